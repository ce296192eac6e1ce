// A process that represents several ranks saves and loads the same files as one process per rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/consolidate.h"
#include "tessera/checkpoint/state_dict.h"
#include "tessera/checkpoint/stored/rank_file.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/optim/adam.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tests/testing/default_device.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/numbers.h"
#include "tests/testing/silent_device.h"
#include "tests/testing/tracing_transport.h"

namespace tessera::testing::local_ranks_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Returns the values of each rank.
std::vector<at::Tensor> of_ranks(const std::function<at::Tensor(int rank)>& make) {
  std::vector<at::Tensor> result;
  for (int r = 0; r < kReplicas; r++) result.push_back(make(r));
  return result;
}

/// A net with a parameter of which the last rank has nothing, a parameter that is in no unit, and a buffer.
struct Extras : NetImpl {
  at::Tensor few = register_parameter("few", at::zeros({5}), false);
  at::Tensor loose = register_parameter("loose", at::zeros({3, 2}), false);
  at::Tensor own = register_buffer("own", at::zeros({2}));
};

Net net_with_extras() {
  const auto net = std::make_shared<Extras>();
  fill_with_numbers(*net);
  return Net(std::shared_ptr<NetImpl>(net));
}

void shard(Net& net, const Mesh& mesh) {
  for (const auto& child : net->children()) fully_shard(child, {.mesh = mesh});
  fully_shard(net, {.mesh = mesh, .ignored = {net->named_parameters(false)["loose"]}});
}

at::Tensor own_values(int rank) {
  return torch::tensor({1.F + static_cast<float>(rank), 0.5F});
}

const std::vector<at::Tensor>& batches() {
  static const auto result = of_ranks([](int rank) { return input().add(0.3 * rank).sin(); });
  return result;
}

/// Trains with an optimizer of libtorch, which gives the same bits wherever shards end.
void train(Net& net, const at::Tensor& batch) {
  torch::optim::SGD optimizer(parameters(*net), torch::optim::SGDOptions(0.1));
  net(batch).sum().backward();
  optimizer.step();
}

class LocalRanks : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { silent_device(); }
  void SetUp() override {
    if (!on_cpu()) GTEST_SKIP() << "the silent device goes with host memory alone";
  }

  Net net_on_device(const Mesh& mesh) const {
    auto net = net_with_extras();
    move_to_silent_device(*net);
    shard(net, mesh);
    net->named_buffers()["own"].copy_(upload(of_ranks(own_values)));
    return net;
  }

  void expect_files_of_threads(const MeshShape& shape) const {
    auto net = net_on_device(Mesh(world_, shape));
    train(net, upload(batches()));
    checkpoint::save(folder_ / "device", {.model = net.ptr().get(), .notes = {{"step", "1"}}}, world_);
    with_ranks(kReplicas, [&](const Communicator& world) {
      auto own = net_with_extras();
      shard(own, Mesh(world, shape));
      own->named_buffers()["own"].copy_(own_values(world.rank()));
      train(own, batches()[static_cast<size_t>(world.rank())]);
      checkpoint::save(folder_ / "threads", {.model = own.ptr().get(), .notes = {{"step", "1"}}}, world);
    });
    checkpoint::consolidate(folder_ / "device", folder_ / "device.safetensors");
    checkpoint::consolidate(folder_ / "threads", folder_ / "threads.safetensors");
    EXPECT_EQ(read_file(folder_ / "device.safetensors"), read_file(folder_ / "threads.safetensors"));
  }

  const Folder folder_;
  const TracingWorld traced_ = tracing_world();
  const Communicator& world_ = traced_.world;
};

TEST_F(LocalRanks, SaveTheFilesOfSoManyProcesses) {
  expect_files_of_threads({.replicate = 1, .shard = kReplicas});
}

TEST_F(LocalRanks, SaveTheFilesOfSoManyProcessesInRowsAndColumns) {
  expect_files_of_threads({.replicate = 2, .shard = 2});
}

TEST_F(LocalRanks, HaveTheirOwnPartsWithoutPadding) {
  const auto counts_of = [&](const MeshShape& shape) {
    const auto folder = folder_ / std::to_string(shape.shard);
    checkpoint::save(folder, {.model = net_on_device(Mesh(world_, shape)).ptr().get()}, world_);
    std::vector<int64_t> counts;
    for (int rank = 0; rank < kReplicas; rank++) {
      const auto file = checkpoint::open_rank_file(folder, rank, kReplicas);
      counts.push_back(file.record.parts.at("few").numel());
      EXPECT_TRUE(at::equal(file.tensors.read("own"), own_values(rank)));
      EXPECT_EQ(file.tensors.contains("loose"), rank == 0);
    }
    return counts;
  };
  EXPECT_THAT(counts_of({.replicate = 1, .shard = 4}), ElementsAre(2, 2, 1, 0));
  EXPECT_THAT(counts_of({.replicate = 2, .shard = 2}), ElementsAre(3, 2, 3, 2));
}

std::vector<std::vector<double>> losses_of(Net& net, optim::Optimizer& optimizer, const Communicator& world) {
  std::vector<std::vector<double>> losses;
  for (int step = 0; step < 3; step++) {
    const auto loss = net(upload(batches())).pow(2).mean();
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    auto& values = losses.emplace_back();
    for (const auto& value : world.replicas(loss)) values.push_back(value.item<double>());
  }
  return losses;
}

std::vector<at::Tensor> trained_parameters(const Net& net) {
  std::vector<at::Tensor> result;
  for (const auto& parameter : parameters(*net)) {
    if (parameter.requires_grad()) result.push_back(parameter);
  }
  return result;
}

TEST_F(LocalRanks, GoOn) {
  auto net = net_on_device(world_);
  optim::AdamW optimizer(trained_parameters(net), {.lr = 0.05});
  losses_of(net, optimizer, world_);
  checkpoint::save(folder_ / "a", {.model = net.ptr().get(), .optimizer = &optimizer, .notes = {{"step", 3}}}, world_);
  const auto expected = losses_of(net, optimizer, world_);

  auto fresh = net_on_device(world_);
  fresh->named_buffers()["own"].zero_();
  fresh->named_parameters(false)["loose"].zero_();
  optim::AdamW other(trained_parameters(fresh), {.lr = 0.05});
  losses_of(fresh, other, world_);
  losses_of(fresh, other, world_);  // the model and optimizer have other values by now
  checkpoint::Contents into{.model = fresh.ptr().get(), .optimizer = &other};
  checkpoint::load(folder_ / "a", into, world_);
  EXPECT_EQ(into.notes, (checkpoint::Notes{{"step", 3}}));
  EXPECT_EQ(losses_of(fresh, other, world_), expected);
  const auto own = download(fresh->named_buffers()["own"]);
  for (int rank = 0; rank < kReplicas; rank++) EXPECT_TRUE(at::equal(own[static_cast<size_t>(rank)], own_values(rank)));
  EXPECT_TRUE(at::equal(fresh->named_parameters(false)["loose"].cpu(), net_with_extras()->named_parameters(false)["loose"]));
}

TEST_F(LocalRanks, HaveTensorsBesideTheModel) {
  auto net = net_on_device(world_);
  const auto own = upload(of_ranks(own_values)), number = own[0], same = upload(of_ranks([](int) { return at::ones({3}); }));
  checkpoint::Contents contents{
      .model = net.ptr().get(), .tensors = {{"same", same}}, .tensors_by_rank = {{"own", own}, {"number", number}}};
  checkpoint::save(folder_ / "a", contents, world_);
  own.zero_();  // also zeroes `number`, a view of it
  same.zero_();
  checkpoint::load(folder_ / "a", contents, world_);
  for (int rank = 0; rank < kReplicas; rank++) {
    EXPECT_TRUE(at::equal(download(own)[static_cast<size_t>(rank)], own_values(rank)));
    EXPECT_TRUE(at::equal(download(same)[static_cast<size_t>(rank)], at::ones({3})));
  }
  with_ranks(kReplicas, [&](const Communicator& world) {
    auto plain = net_with_extras();
    shard(plain, world);
    checkpoint::Contents into{
        .model = plain.ptr().get(), .tensors = {{"same", {}}, {"own", {}}}, .tensors_by_rank = {{"number", at::zeros({})}}};
    checkpoint::load(folder_ / "a", into, world);
    EXPECT_EQ(into.tensors_by_rank.at("number").item<float>(), 1.F + static_cast<float>(world.rank()));
    EXPECT_EQ(into.tensors.at("own").sizes(), (at::IntArrayRef{2 * kReplicas}));
  });
  contents.tensors = {{"mean", own}};
  EXPECT_THAT(message_of<DisagreementError>([&] { checkpoint::save(folder_ / "b", contents, world_); }),
              HasSubstr("'mean' has different values"));
}

TEST_F(LocalRanks, LoadWholeWeights) {
  auto net = net_on_device(world_);
  train(net, upload(batches()));
  checkpoint::save(folder_ / "a", {.model = net.ptr().get()}, world_);
  checkpoint::consolidate(folder_ / "a", folder_ / "whole");
  auto fresh = net_on_device(world_);
  checkpoint::load_weights(*fresh, folder_ / "whole");
  const auto expected = full_state(*net, Ranks::First), actual = full_state(*fresh, Ranks::First);
  for (const auto& [name, value] : expected) {
    if (name == "own") continue;
    EXPECT_TRUE(at::equal(actual.at(name).cpu(), value.cpu())) << name;
  }
}

TEST_F(LocalRanks, HaveFullStateDicts) {
  auto net = net_on_device(world_);
  train(net, upload(batches()));
  const auto dict = checkpoint::full_state_dict(*net, {.offload_to_cpu = true, .rank0_only = true});
  EXPECT_EQ(checkpoint::full_state_dict(*net).at("a.weight").device(), silent_device());
  for (const auto& [name, value] : full_state(*net)) {
    EXPECT_TRUE(dict.at(name).is_cpu());
    EXPECT_TRUE(at::equal(dict.at(name), value.cpu())) << name;
  }
  for (const bool broadcast : {false, true}) {
    auto fresh = net_on_device(world_);
    checkpoint::load_full_state_dict(*fresh, dict, {.broadcast_from_rank0 = broadcast});
    for (const auto& [name, value] : checkpoint::full_state_dict(*fresh, {.offload_to_cpu = true})) {
      EXPECT_TRUE(at::equal(dict.at(name), value)) << name;
    }
  }
  EXPECT_THAT(message_of<UsageError>([&] { (void)checkpoint::sharded_state_dict(*net); }), HasSubstr("represents 4 ranks"));
}

TEST_F(LocalRanks, HaveFullStateDictsOfOptimizers) {
  auto net = net_on_device(world_), fresh = net_on_device(world_);
  optim::AdamW optimizer(trained_parameters(net), {.lr = 0.05}), other(trained_parameters(fresh), {.lr = 0.05});
  losses_of(net, optimizer, world_);
  const auto dict = checkpoint::full_optim_state_dict(&optimizer, *net, {.offload_to_cpu = true});
  EXPECT_EQ(dict.at("a.weight").at("exp_avg").sizes(), (at::IntArrayRef{10, 6}));
  EXPECT_TRUE(dict.at("a.weight").at("exp_avg").is_cpu());
  EXPECT_EQ(checkpoint::full_optim_state_dict(&optimizer, *net).at("a.weight").at("exp_avg").device(), silent_device());
  checkpoint::load_full_state_dict(*fresh, checkpoint::full_state_dict(*net));
  checkpoint::load_full_optim_state_dict(&other, *fresh, dict);
  EXPECT_EQ(losses_of(fresh, other, world_), losses_of(net, optimizer, world_));
}

TEST_F(LocalRanks, AreAllInWhatAShardSaysOfItself) {
  const auto net = net_on_device(world_);
  for (const auto& shard : parameters(*net)) {
    const auto info = shard_info(shard);
    if (!info) continue;  // "loose", which is not sharded
    const auto counts = at::zeros(info->shape, at::kLong);
    for (const auto& slice : info->slices) view_of(counts, slice).add_(1);
    EXPECT_TRUE(counts.eq(1).all().item<bool>()) << info->name;
  }
}

}  // namespace
}  // namespace tessera::testing::local_ranks_test
