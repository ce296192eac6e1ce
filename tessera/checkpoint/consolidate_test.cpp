// The consolidated file has the same contents as full_state() of the running model.
#include "tessera/checkpoint/consolidate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/stored/rank_file.h"
#include "tessera/shard/full_params.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/picture.h"
#include "tests/testing/same_tensors.h"

namespace tessera::testing::consolidate_test {
namespace {

using ::testing::HasSubstr;

void expect_all_of(const std::map<std::string, at::Tensor>& state, const std::filesystem::path& path) {
  const checkpoint::SafetensorsFile file(path);
  auto names = file.metadata();
  EXPECT_EQ(names.at("format"), "pt");
  names.erase("format");
  EXPECT_EQ(file.names().size() + names.size(), state.size());
  for (const auto& [name, tensor] : state) {
    const auto saved = file.read(names.contains(name) ? names.at(name) : name);
    EXPECT_EQ(saved.sizes(), tensor.sizes()) << name;
    EXPECT_TRUE(same_values(saved, tensor)) << name;
  }
}

void expect_whole(int ranks, const ShardPicture& shard) {
  const Folder folder;
  std::map<std::string, at::Tensor> state;
  with_ranks(ranks, [&](const Communicator& world) {
    const PictureRun run(world, shard);
    run.train(0, 2);
    checkpoint::save(folder / "a", {.model = run.model.get(), .optimizer = run.optimizer.get()}, world);
    auto whole = full_state(*run.model);
    if (world.rank() == 0) state = std::move(whole);
  });
  const auto done = checkpoint::consolidate(folder / "a", folder / "whole.safetensors");
  expect_all_of(state, folder / "whole.safetensors");
  EXPECT_EQ(done.tensors, 11);
  EXPECT_EQ(done.parameters, 5 * 27 + 5 + 5 + 5 + 25 + 5 + 15 + 3);
  EXPECT_EQ(done.bytes, (done.parameters + 5 + 5) * 4 + 8);
}

TEST(Consolidate, MakesOneFileOfARunOfAnyNumberOfRanks) {
  for (const int ranks : {1, 2, 3, 7}) expect_whole(ranks, shard_nested);
}

TEST(Consolidate, MakesOneFileOfModelsThatAreNotSharded) {
  for (const int ranks : {1, 2}) expect_whole(ranks, [](const auto&, const auto&) {});
}

TEST(Consolidate, TakesReplicatedPartsOnce) {
  expect_whole(4, [](const auto& model, const Communicator& world) {
    fully_shard(model->conv, {.mesh = world});
    fully_shard(model, {.mesh = Mesh(world, {.replicate = 2, .shard = 2})});
  });
}

TEST(Consolidate, ReplacesNoFileOfTheCheckpoint) {
  const Folder folder;
  with_ranks(1, [&](const Communicator& world) {
    checkpoint::save(folder / "a", {.model = sharded_net(world).get()}, world);
    EXPECT_THAT(message_of<UsageError>([&] { (void)checkpoint::consolidate(folder / "a", folder / "a" / "rank-0-of-1.safetensors"); }),
                HasSubstr("lies in the checkpoint"));
  });
}

TEST(Consolidate, CallsParametersAsTheModelDoes) {
  const Folder folder;
  std::map<std::string, at::Tensor> state;
  with_ranks(2, [&](const Communicator& world) {
    const auto net = sharded_net(world);  // each unit is one layer
    checkpoint::save(folder / "a", {.model = net.ptr().get()}, world);
    auto whole = full_state(*net);
    if (world.rank() == 0) state = std::move(whole);
  });
  checkpoint::consolidate(folder / "a", folder / "whole.safetensors");
  expect_all_of(state, folder / "whole.safetensors");
}

TEST(Consolidate, RefusesFilesThatDoNotBelongTogether) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    checkpoint::save(folder / "a", {.model = run.model.get()}, world);
    const auto wide = std::make_shared<Picture>();
    wide->frozen = wide->replace_module("frozen", torch::nn::Linear(5, 4));
    shard_nested(wide, world);
    checkpoint::save(folder / "b", {.model = wide.get()}, world);
    const auto net = sharded_net(world);
    checkpoint::save(folder / "c", {.model = net.ptr().get()}, world);
  });
  const auto replace = [&](const char* other) {
    std::filesystem::copy_file(folder / other / "rank-1-of-2.safetensors", folder / "a/rank-1-of-2.safetensors",
                               std::filesystem::copy_options::overwrite_existing);
    return message_of<IoError>([&] { checkpoint::consolidate(folder / "a", folder / "whole.safetensors"); });
  };
  for (const auto* other : {"b", "c"}) EXPECT_THAT(replace(other), HasSubstr("or of another save"));
  std::filesystem::remove(folder / "a/manifest.json");
  for (const auto* other : {"b", "c"}) EXPECT_THAT(replace(other), HasSubstr("come from different saves"));
  EXPECT_FALSE(std::filesystem::exists(folder / "whole.safetensors"));
  EXPECT_FALSE(std::filesystem::exists(folder / "whole.safetensors.part"));
}

/// Writes a rank's file with these slices of numbers([3, 4]), a tensor "w" that is stored by columns.
void write_slices(const std::filesystem::path& folder, int rank, const std::vector<TensorSlice>& slices) {
  checkpoint::RankRecord record{.rank = rank, .ranks = 2};
  const auto& part = record.parts["w"] = {.shape = {3, 4}, .strides = {1, 3}, .slices = slices};
  const auto values = at::empty({part.numel()});
  const auto views = views_of_slices(values, slices, part.strides);
  for (size_t i = 0; i < views.size(); i++) views[i].copy_(view_of(numbers({3, 4}, 0), slices[i]));
  std::filesystem::create_directories(folder);
  checkpoint::SafetensorsWriter writer(checkpoint::rank_file(folder, rank, 2), {{.name = "w", .sizes = {part.numel()}}},
                                       checkpoint::to_metadata(record));
  writer.write(values);
  writer.close();
}

TEST(Consolidate, TakesAnySlicesInAnyOrder) {
  const Folder folder;
  const auto slice = [](std::vector<int64_t> offsets, std::vector<int64_t> sizes) {
    return TensorSlice{.shape = {3, 4}, .offsets = std::move(offsets), .sizes = std::move(sizes)};
  };
  write_slices(folder / "a", 0, {slice({1, 2}, {2, 2}), slice({0, 0}, {1, 4})});
  write_slices(folder / "a", 1, {slice({1, 1}, {2, 3}), slice({1, 0}, {2, 1}), slice({0, 0}, {0, 4})});
  checkpoint::consolidate(folder / "a", folder / "whole");
  EXPECT_TRUE(same_values(checkpoint::SafetensorsFile(folder / "whole").read("w"), numbers({3, 4}, 0)));

  write_slices(folder / "a", 1, {slice({1, 0}, {2, 1})});
  EXPECT_THAT(message_of<IoError>([&] { checkpoint::consolidate(folder / "a", folder / "none"); }),
              HasSubstr("lack values of 'w', the first of them at [1, 1]"));
  EXPECT_FALSE(std::filesystem::exists(folder / "none"));
}

TEST(Consolidate, GivesAllRanksTheResultOrTheError) {
  const Folder folder;
  with_ranks(3, [&](const Communicator& world) {
    const PictureRun run(world);
    checkpoint::save(folder / "a", {.model = run.model.get()}, world);
    const auto done = checkpoint::consolidate(folder / "a", folder / "whole", world);
    EXPECT_EQ(done.tensors, 11);
    EXPECT_EQ(checkpoint::SafetensorsFile(folder / "whole").names().size(), 11U);
    const auto said = message_of<IoError>([&] { checkpoint::consolidate(folder / "none", folder / "other", world); });
    EXPECT_THAT(said, HasSubstr("there is no checkpoint " + (folder / "none").string()));
    EXPECT_EQ(said.starts_with("rank 0 could not consolidate"), !world.is_first()) << said;
    const auto own_name = folder / ("whole-" + std::to_string(world.rank()));
    EXPECT_THAT(message_of<IoError>([&] { checkpoint::consolidate(folder / "a", own_name, world); }),
                HasSubstr("give all ranks the same path"));
  });
}

TEST(Consolidate, OnAllRanksAtOnceSpoilsNothing) {
  const Folder folder;
  with_ranks(3, [&](const Communicator& world) {
    const PictureRun run(world);
    checkpoint::save(folder / "a", {.model = run.model.get()}, world);
    for (int i = 0; i < 20; i++) {
      if (world.rank() == 0) std::filesystem::remove(folder / "whole");
      world.barrier();
      try {
        checkpoint::consolidate(folder / "a", folder / "whole");
      } catch (const IoError& error) {
        EXPECT_THAT(error.what(), HasSubstr("make it on one rank"));
      }
      world.barrier();
      EXPECT_EQ(checkpoint::SafetensorsFile(folder / "whole").names().size(), 11U);  // a whole file, written by one of the ranks
      EXPECT_FALSE(std::filesystem::exists(folder / "whole.part"));
      world.barrier();
    }
  });
}

TEST(Consolidate, KeepsNothingWhenTheDiskIsFull) {
  const Folder folder;
  with_ranks(1, [&](const Communicator& world) { checkpoint::save(folder / "a", {.model = PictureRun(world).model.get()}, world); });
  const FullDisk full(1'500);
  EXPECT_THAT(message_of<IoError>([&] { checkpoint::consolidate(folder / "a", folder / "whole.safetensors"); }),
              HasSubstr("File too large"));
  EXPECT_FALSE(std::filesystem::exists(folder / "whole.safetensors"));
  EXPECT_FALSE(std::filesystem::exists(folder / "whole.safetensors.part"));
}

}  // namespace
}  // namespace tessera::testing::consolidate_test
