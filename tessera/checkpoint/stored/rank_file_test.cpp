// The records in the ranks' files suffice to assemble every tensor, without any knowledge of how Tessera shards.
#include "tessera/checkpoint/stored/rank_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/consolidate.h"
#include "tessera/shard/full_params.h"
#include "tests/testing/default_device.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/picture.h"
#include "tests/testing/same_tensors.h"

namespace tessera::testing::rank_file_test {
namespace {

using checkpoint::open_rank_file;
using checkpoint::PartRecord;
using checkpoint::rank_file;
using checkpoint::RankFile;
using checkpoint::SafetensorsEntry;
using checkpoint::SafetensorsFile;
using checkpoint::SafetensorsWriter;
using ::testing::HasSubstr;
using Tensors = std::map<std::string, at::Tensor>;

constexpr int kRanks = 3;

/// Puts together the tensors that the files have records of.
Tensors assemble(const std::filesystem::path& folder, std::map<std::string, PartRecord> checkpoint::RankRecord::* records) {
  Tensors result;
  for (int rank = 0; rank < kRanks; rank++) {
    const auto file = open_rank_file(folder, rank, kRanks);
    for (const auto& [name, part] : file.record.*records) {
      const auto values = file.tensors.read(name).flatten();
      auto& whole = result.try_emplace(name, at::full(part.shape, -1, values.options())).first->second;
      const auto views = views_of_slices(values, part.slices, part.strides);
      for (size_t i = 0; i < views.size(); i++) view_of(whole, part.slices[i]).copy_(views[i]);
    }
  }
  return result;
}

/// The optimizer's state of one rank, and where its values are in the memory of the whole parameter.
struct Kept {
  std::map<std::string, optim::ParameterState> state;
  std::map<std::string, ShardInfo> infos;
};

Kept kept_by(const PictureRun& run) {
  Kept kept;
  for (const auto& [name, state] : run.optimizer->state(*run.model)) {
    for (const auto& [key, tensor] : state) kept.state[name][key] = tensor.clone();
  }
  for (const auto& [name, shard] : named_parameters(*run.model)) {
    if (const auto info = shard_info(shard)) kept.infos.emplace(name, *info);
  }
  return kept;
}

/// The whole state that the ranks' optimizers keep, put together from the pieces of the flat buffers.
at::Tensor whole_state(const std::vector<Kept>& ranks, const std::string& name, const std::string& key, const at::Tensor& like) {
  const auto flat = at::empty({like.numel()});
  for (const auto& rank : ranks) {
    const auto& info = rank.infos.at(name);
    flat.narrow(0, info.begin, info.numel).copy_(rank.state.at(name).at(key).flatten());
  }
  return flat.as_strided(like.sizes(), like.strides());
}

TEST(RankFile, SlicesAloneTellWhereValuesBelong) {
  const Folder folder;
  Tensors parameters;
  std::vector<Kept> kept(kRanks);
  with_ranks(kRanks, [&](const Communicator& world) {
    const PictureRun run(world);
    run.train(0, 2);
    checkpoint::save(folder / "a", {.model = run.model.get(), .optimizer = run.optimizer.get()}, world);
    kept[static_cast<size_t>(world.rank())] = kept_by(run);
    auto state = full_state(*run.model);
    if (world.rank() != 0) return;
    for (const auto& item : run.model->named_parameters()) parameters[item.key()] = state.at(item.key());
  });

  parameters.erase("head.weight");  // another name of tied
  const auto whole = assemble(folder / "a", &checkpoint::RankRecord::parts);
  EXPECT_EQ(whole.size(), parameters.size());
  for (const auto& [name, expected] : parameters) EXPECT_TRUE(same_values(whole.at(name), expected)) << name;

  const auto state = assemble(folder / "a", &checkpoint::RankRecord::state);
  const Picture like;
  for (const auto* name : {"conv.weight", "conv.bias", "norm.weight", "norm.bias", "tied", "head.bias"}) {
    const auto parameter = like.named_parameters()[name];
    for (const auto* key : {"exp_avg", "exp_avg_sq"}) {
      const auto& actual = state.at(std::string("optimizer.") + name + "." + key);
      EXPECT_TRUE(same_values(actual, whole_state(kept, name, key, parameter))) << name << " " << key;
    }
    EXPECT_EQ(state.at(std::string("optimizer.") + name + ".step").item<int64_t>(), 2);
  }
}

TEST(RankFile, HasOneScaleForEachBlockOfAParameter) {
  if (!on_cpu()) GTEST_SKIP() << "AdamW8bit works in host memory";
  const Folder folder;
  with_ranks(kRanks, [&](const Communicator& world) {
    torch::nn::Linear wide(300, 17);
    fully_shard(wide, {.mesh = world, .start = Start::FromRank0});
    optim::AdamW8bit optimizer(parameters(*wide), {.lr = 0.1});
    wide->forward(at::ones({2, 300})).sum().backward();
    optimizer.step();
    checkpoint::save(folder / "a", {.model = wide.ptr().get(), .optimizer = &optimizer}, world);
  });
  auto covered = at::zeros({20}, at::kLong);  // of 5100 values
  for (int rank = 0; rank < kRanks; rank++) {
    const auto file = open_rank_file(folder / "a", rank, kRanks);
    const auto& part = file.record.state.at("optimizer.weight.exp_avg_scales");
    EXPECT_EQ(part.shape, std::vector<int64_t>{20});
    EXPECT_EQ(file.tensors.info("optimizer.weight.exp_avg_scales").sizes, std::vector{part.numel()});
    for (const auto& slice : part.slices) view_of(covered, slice).add_(1);
    EXPECT_EQ(file.record.state.at("optimizer.weight.exp_avg").slices, file.record.parts.at("weight").slices);
  }
  EXPECT_TRUE(covered.eq(1).all().item<bool>());
}

/// Writes the file anew with other metadata.
void change(const std::filesystem::path& path, const std::function<void(nlohmann::json&)>& edit) {
  const SafetensorsFile file(path);
  std::vector<SafetensorsEntry> entries;
  for (const auto& name : file.names()) entries.push_back(file.info(name));
  auto metadata = file.metadata();
  auto record = nlohmann::json::parse(metadata.at("tessera"));
  edit(record);
  metadata["tessera"] = record.dump();
  SafetensorsWriter writer(path, entries, metadata);
  for (const auto& name : file.names()) writer.write(file.read(name));
  writer.close();
}

TEST(RankFile, WithoutItsChecksumsIsRefused) {
  const Folder folder;
  with_ranks(1, [&](const Communicator& world) { checkpoint::save(folder / "a", {.model = sharded_net(world).ptr().get()}, world); });
  const auto path = rank_file(folder / "a", 0, 1);
  auto bytes = read_file(path);
  bytes[bytes.find("xxh3_64")] = 'y';
  write_file(path, bytes);
  EXPECT_THAT(message_of<IoError>([&] { (void)open_rank_file(folder / "a", 0, 1); }), HasSubstr("its checksums are gone"));
}

TEST(RankFile, OfAnotherVersionIsNotTakenForADamagedOne) {
  const Folder folder;
  with_ranks(1, [&](const Communicator& world) {
    checkpoint::save(folder / "a", {.model = sharded_net(world).ptr().get()}, world);
    for (const int format : {2, 4}) {
      change(rank_file(folder / "a", 0, 1), [&](auto& record) { record["format"] = format; });
      EXPECT_THAT(message_of<UsageError>([&] { (void)open_rank_file(folder / "a", 0, 1); }), HasSubstr("this version of Tessera reads 3"));
    }
  });
}

TEST(RankFile, ThatMakesNoSenseIsRefused) {
  const Folder folder;
  with_ranks(1, [&](const Communicator& world) {
    const auto refusal = [&](const std::function<void(nlohmann::json&)>& edit) {
      std::filesystem::remove_all(folder / "a");
      checkpoint::save(folder / "a", {.model = sharded_net(world).ptr().get()}, world);
      change(rank_file(folder / "a", 0, 1), edit);
      return message_of<IoError>([&] { (void)open_rank_file(folder / "a", 0, 1); });
    };
    const auto of_part = [&](const std::function<void(nlohmann::json&)>& edit) {
      return refusal([&](auto& record) { edit(record["parts"]["a.weight"]); });
    };
    EXPECT_THAT(of_part([](auto& part) { part["slices"][0]["offsets"][1] = 1; }), HasSubstr("'a.weight' makes no sense: it has a slice"));
    EXPECT_THAT(of_part([](auto& part) { part["slices"][0]["sizes"] = {60}; }), HasSubstr("does not fit into its shape"));
    EXPECT_THAT(of_part([](auto& part) { part["strides"] = {1}; }), HasSubstr("one stride for each dimension"));
    EXPECT_THAT(of_part([](auto& part) { part["slices"][0]["sizes"][0] = 9; }), HasSubstr("does not have the 54 values of 'a.weight'"));
  });
}

}  // namespace
}  // namespace tessera::testing::rank_file_test
