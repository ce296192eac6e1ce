// Sharded steps by the compiler's figures: how often units are gathered, and how much memory a step takes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/optim/sgd.h"
#include "tessera/shard/checkpoint_modules.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/strategy.h"
#include "tessera/shard/wrap.h"
#include "tessera/xla/init.h"

namespace tessera::xla::sharded_memory_test {
namespace {

constexpr int kReplicas = 4;
constexpr int64_t kWidth = 256, kRows = 16;
constexpr int64_t kBytes = kWidth * kWidth * 4;  // of a layer

const Communicator& four() {
  static const auto world = init({.devices = kReplicas});
  return world;
}

using Forward = std::function<at::Tensor(at::Tensor x)>;

/// Trains some steps, until the order of units is known, and returns the program that ran most often.
ProgramMetrics step_of(const torch::nn::Module& model, const Forward& forward) {
  optim::SGD optimizer(parameters(model), {.lr = 0.01});
  const auto before = metrics().programs;
  for (int step = 0; step < 4; step++) {
    forward(torch::ones({kRows, kWidth}, torch::TensorOptions(four().traits().device))).pow(2).mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  // Executions are compared because the program may have existed before.
  size_t most = 0;
  int64_t times = 0;
  const auto after = metrics().programs;
  for (size_t i = 0; i < after.size(); i++) {
    const auto more = after[i].executions - (i < before.size() ? before[i].executions : 0);
    if (more > times) std::tie(most, times) = std::pair(i, more);
  }
  return after[most];
}

/// Returns the program of a model with so many layers, each a unit.
ProgramMetrics step_of(int layers, const ShardOptions& options) {
  torch::manual_seed(1);
  torch::nn::Sequential model;
  for (int i = 0; i < layers; i++) {
    model->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
    model->push_back(torch::nn::ReLU());
  }
  to_device(*model);
  fully_shard(*model, options, wrap_always());
  return step_of(*model, [&](const at::Tensor& x) { return model->forward(x); });
}

int count_of(const ProgramMetrics& program, const std::string& collective) {
  const auto found = program.collectives.find(collective);
  return found == program.collectives.end() ? 0 : found->second.count;
}

int64_t bytes_of(const ProgramMetrics& program, const std::string& collective) {
  const auto found = program.collectives.find(collective);
  return found == program.collectives.end() ? 0 : found->second.bytes;
}

TEST(ShardedStep, GathersEachUnitAgainInBackward) {
  for (const int layers : {4, 8}) {
    const auto step = step_of(layers, {.mesh = four()});
    // Backward does not gather the first unit, whose input needs no gradient, nor the last, which stays unsharded from forward on.
    EXPECT_EQ(bytes_of(step, "all-gather"), (2 * layers - 2) * kBytes) << layers;
    EXPECT_EQ(bytes_of(step, "reduce-scatter"), layers * kBytes / kReplicas) << layers;
    EXPECT_EQ(count_of(step, "all-reduce"), 0);
  }
}

TEST(ShardedStep, TakesMemoryForFewUnitsAtATime) {
  const auto grows_by = [](const ShardOptions& options) { return (step_of(12, options).memory.temporary - step_of(6, options).memory.temporary) / 6; };
  const auto of_a_layer = grows_by({.mesh = four()});
  EXPECT_LT(of_a_layer, kBytes / 2) << "activations and gradients of shards";
  EXPECT_GT(grows_by({.mesh = four(), .reshard_after_forward = false}), kBytes);
  EXPECT_LT(step_of(12, {.mesh = four()}).memory.temporary, 0.4 * static_cast<double>(step_of(12, {.mesh = four(), .reshard_after_forward = false}).memory.temporary));
}

TEST(ShardedStep, TakesLessThanAModelThatIsWhole) {
  const auto whole = step_of(12, sharding_strategy(four(), ShardingStrategy::NoShard)).memory, sharded = step_of(12, {.mesh = four()}).memory;
  EXPECT_LT(sharded.temporary, 0.4 * static_cast<double>(whole.temporary)) << "which has the gradients of all layers";
}

TEST(ShardedStep, HasItsPartOfTheParameters) {
  for (const int parts : {1, 2, 4}) {
    const auto memory = step_of(12, {.mesh = Mesh(four(), MeshShape{.replicate = kReplicas / parts, .shard = parts})}).memory;
    const auto expected = 12 * kBytes / parts + kRows * kWidth * 4;
    EXPECT_NEAR(static_cast<double>(memory.arguments), static_cast<double>(expected), 0.1 * static_cast<double>(expected)) << parts;
  }
}

TEST(ShardedStep, WithoutBarriersKeepsWhatForwardHasGathered) {
  const int layers = 8;
  const auto without = step_of(layers, {.mesh = four(), .schedule = {.tracing = {.barrier_in_forward = false, .barrier_in_backward = false}}});
  EXPECT_EQ(bytes_of(without, "all-gather"), layers * kBytes);
  EXPECT_GT(without.memory.temporary, layers * kBytes);
  // One of the two barriers is enough to make backward gather again.
  const auto backward = step_of(layers, {.mesh = four(), .schedule = {.tracing = {.barrier_in_forward = false}}});
  EXPECT_EQ(bytes_of(backward, "all-gather"), (2 * layers - 2) * kBytes);
}

TEST(ShardedStep, ThatGathersAheadTakesMoreMemory) {
  const auto ahead = step_of(12, {.mesh = four(), .schedule = {.prefetch_depth = 1}}), same = step_of(12, {.mesh = four()});
  EXPECT_EQ(bytes_of(ahead, "all-gather"), bytes_of(same, "all-gather"));
  EXPECT_LE(ahead.memory.temporary, same.memory.temporary + 3 * kBytes);
}

TEST(ShardedStep, GathersBf16AsSixteenBits) {
  const auto step = step_of(4, {.mesh = four(), .mixed_precision = {.param_dtype = at::kBFloat16}});
  EXPECT_EQ(bytes_of(step, "all-gather"), (2 * 4 - 2) * kBytes / 2);
}

// --- Activation checkpointing ---

struct WideImpl : torch::nn::Module {
  torch::nn::Linear up{register_module("up", torch::nn::Linear(torch::nn::LinearOptions(kWidth, 4 * kWidth).bias(false)))};
  torch::nn::Linear down{register_module("down", torch::nn::Linear(torch::nn::LinearOptions(4 * kWidth, kWidth).bias(false)))};
  at::Tensor forward(const at::Tensor& x) { return x + down(up(x).sin().exp().tanh()); }
};
TORCH_MODULE(Wide);

/// Returns the program of a model with so many blocks, each a unit.
ProgramMetrics step_of_blocks(int blocks, bool checkpoints) {
  torch::manual_seed(1);
  torch::nn::ModuleList model;
  for (int i = 0; i < blocks; i++) model->push_back(Wide());
  to_device(*model);
  fully_shard(*model, {.mesh = four()}, wrap_classes({"Wide"}));
  return step_of(*model, [&](at::Tensor x) {
    for (const auto& each : *model) {
      Wide block(std::dynamic_pointer_cast<WideImpl>(each));
      x = checkpoints ? activation::checkpoint(block, x) : block->forward(x);
    }
    return x;
  });
}

TEST(CheckpointedStep, ComputesAgainWhatItHasNotKept) {
  const auto of_a_block = [](bool checkpoints) {
    const auto more = step_of_blocks(8, checkpoints), few = step_of_blocks(4, checkpoints);
    return std::pair((bytes_of(more, "all-gather") - bytes_of(few, "all-gather")) / 4, (more.memory.temporary - few.memory.temporary) / 4);
  };
  const auto [gathered, kept] = of_a_block(true);
  const auto [gathered_without, kept_without] = of_a_block(false);
  EXPECT_EQ(gathered, gathered_without);
  EXPECT_EQ(gathered, 2 * 8 * kBytes) << "in forward and in backward";
  const int64_t input = kRows * kWidth * 4;
  EXPECT_GE(kept_without, 2 * 4 * input) << "some of what is saved for sin and exp, tanh and the second layer";
  EXPECT_LT(kept, 1.1 * static_cast<double>(input)) << "the input of each block";
}

}  // namespace
}  // namespace tessera::xla::sharded_memory_test
