// Checkpointed modules of a sharded model: they train as without checkpointing, to the bit, and cost no operation more.
#include "tessera/shard/checkpoint_modules.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_sharded.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/reduction.h"
#include "tessera/shard/report.h"
#include "tests/testing/blocks.h"
#include "tests/testing/net.h"

namespace tessera::testing::checkpoint_modules_test {
namespace {

namespace nn = torch::nn;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// Several layers that take the same input. If the layers have a narrower dtype, the input is cast only once.
struct Heads : nn::Module {
  nn::Linear a = register_module("a", nn::Linear(8, 8)), b = register_module("b", nn::Linear(8, 8)),
             c = register_module("c", nn::Linear(8, 8));
  at::Tensor forward(const at::Tensor& x) { return x + a(x) * b(x) + c(x); }
};

/// Blocks that are called by tessera::call, with a norm whose running statistics would show a second update.
struct Called : nn::Module {
  std::vector<std::shared_ptr<Block>> block;
  std::shared_ptr<Heads> heads = register_module("heads", std::make_shared<Heads>());
  nn::BatchNorm1d norm = register_module("norm", nn::BatchNorm1d(8));
  nn::Linear head = register_module("head", nn::Linear(8, 8));
  Called() {
    for (int i = 0; i < 3; i++) block.push_back(register_module("block" + std::to_string(i), std::make_shared<Block>()));
    fill_with_numbers(*this);
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& each : block) x = call(each, x);
    return head(call(norm, call(heads, x)));
  }
};

WrapPolicy blocks_and_norm() {
  return wrap_classes({"Block", "Heads", "BatchNorm1d"});
}

enum class Marked { Not, BeforeSharding, AfterSharding };
enum class Way { Plain, Accumulating, SteppingInBackward, Clipping };

struct Outcome {
  std::vector<at::Tensor> tensors;
  uint64_t gathers = 0, reductions = 0;
};

Outcome train(const ShardOptions& options, const activation::Options& checkpointing, Marked marked, Way way, bool in_units) {
  const auto model = std::make_shared<Called>();
  if (marked == Marked::BeforeSharding) activation::checkpoint_modules(model, blocks_and_norm(), checkpointing);
  if (in_units) {
    fully_shard(model, options, wrap_classes({"Block", "Heads"}));
  } else {
    fully_shard(model, options);
  }
  if (marked == Marked::AfterSharding) activation::checkpoint_modules(model, blocks_and_norm(), checkpointing);
  optim::SGD optimizer(model->parameters(), {.lr = 0.1, .momentum = 0.9});
  if (way == Way::SteppingInBackward) optimizer.step_in_backward();
  Outcome outcome;
  const auto rank = options.mesh->world().rank();
  for (int step = 0; step < 4; step++) {
    if (step == 2) reset_counters(*model);
    const auto loss = [&](int part) { return call(model, numbers({5, 8}, 10 * step + 3 * rank + part)).to(at::kFloat).pow(2).mean(); };
    if (way == Way::Accumulating) {
      const auto waiting = no_sync(*model);
      loss(1).backward();
    }
    const auto value = loss(0);
    value.backward();
    outcome.tensors.push_back(value.detach());
    if (way == Way::Clipping) outcome.tensors.push_back(clip_grad_norm(parameters(*model), 0.1));
    optimizer.step();
    optimizer.zero_grad();
    for (const auto& buffer : model->buffers()) outcome.tensors.push_back(buffer.clone());
  }
  for (const auto& unit : units(*model)) {
    outcome.gathers += unit->counters().gathers;
    outcome.reductions += unit->counters().reductions;
  }
  for (const auto& [name, value] : full_state(*model)) outcome.tensors.push_back(value);
  return outcome;
}

struct Sharding {
  std::string name;
  std::function<void(ShardOptions&)> choose;
  friend std::ostream& operator<<(std::ostream& out, const Sharding& self) { return out << self.name; }
};

class CheckpointedModules : public ::testing::TestWithParam<Sharding> {};

TEST_P(CheckpointedModules, TrainAsPlainOnes) {
  with_ranks(2, [](const Communicator& world) {
    ShardOptions options{.mesh = world};
    GetParam().choose(options);
    for (const bool in_units : {true, false}) {
      for (const auto way : {Way::Plain, Way::Accumulating, Way::SteppingInBackward, Way::Clipping}) {
        SCOPED_TRACE(fmt::format("in_units {}, way {}", in_units, static_cast<int>(way)));
        const bool zeros = options.schedule.unused_parameters == UnusedParameters::Zeros;
        if (way == Way::SteppingInBackward && zeros) continue;  // not available
        const auto plain = train(options, {}, Marked::Not, way, in_units);
        const auto expect_equal = [&](const activation::Options& checkpointing, Marked marked) {
          const auto ours = train(options, checkpointing, marked, way, in_units);
          ASSERT_EQ(ours.tensors.size(), plain.tensors.size());
          for (size_t i = 0; i < ours.tensors.size(); i++) EXPECT_TRUE(at::equal(ours.tensors[i], plain.tensors[i])) << i;
          EXPECT_EQ(ours.gathers, plain.gathers);
          EXPECT_EQ(ours.reductions, plain.reductions);
        };
        expect_equal({}, Marked::AfterSharding);
        if (way != Way::Plain) continue;
        expect_equal({}, Marked::BeforeSharding);
        expect_equal({.keep = activation::operators({"aten::addmm", "aten::mm"})}, Marked::AfterSharding);
        expect_equal({.offload = OffloadTo::Disk}, Marked::AfterSharding);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Shardings, CheckpointedModules,
    ::testing::Values(Sharding{"Default", [](ShardOptions&) {}},
                      Sharding{"Gathered", [](ShardOptions& options) { options.residence = Residence::Gathered; }},
                      Sharding{"Rows", [](ShardOptions& options) { options.layout = Layout::Rows; }},
                      Sharding{"WholeParameters", [](ShardOptions& options) { options.layout = Layout::WholeParameters; }},
                      Sharding{"FlatListing", [](ShardOptions& options) { options.listing = Listing::Flat; }},
                      Sharding{"Kept", [](ShardOptions& options) { options.reshard_after_forward = false; }},
                      Sharding{"OneLiveUnit", [](ShardOptions& options) { options.schedule.max_live_units = 1; }},
                      Sharding{"Zeros", [](ShardOptions& options) { options.schedule.unused_parameters = UnusedParameters::Zeros; }},
                      Sharding{"Bfloat16", [](ShardOptions& options) { options.mixed_precision.param_dtype = at::kBFloat16; }},
                      Sharding{"CastsAtBoundaries",
                               [](ShardOptions& options) {
                                 options.mixed_precision = {.param_dtype = at::kBFloat16, .output_dtype = at::kFloat};
                               }}),
    ::testing::PrintToStringParamName());

TEST(CheckpointedModule, IsNotCalledPlainly) {
  with_ranks(2, [](const Communicator& world) {
    for (const bool first : {true, false}) {
      const auto model = std::make_shared<Called>();
      if (first) activation::checkpoint_module(model->block[1]);
      fully_shard(model, {.mesh = world});
      if (!first) activation::checkpoint_module(model->block[1]);
      const auto x = numbers({2, 8});
      model->block[0]->forward(x);  // of the same unit, but not marked
      EXPECT_THAT(message_of<UsageError>([&] { model->block[1]->forward(x); }),
                  AllOf(HasSubstr("activation checkpointing of Block acts where that module is called"),
                        HasSubstr("tessera::call(module, x...)"), HasSubstr("activation::checkpoint_sequential, or leave the option out")));
      const torch::NoGradGuard no_grad;
      model->block[1]->forward(x);
    }
  });
}

TEST(CheckpointedModule, CanBeAClassThatShards) {
  with_ranks(2, [](const Communicator& world) {
    Net plain = seeded_net(), net = seeded_net();
    FullyShardedDataParallel sharded(net, world);
    activation::checkpoint_module(net);
    const auto y = sharded(input());
    y.sum().backward();
    plain(input()).sum().backward();
    EXPECT_TRUE(at::equal(full_grad(net->b->weight), plain->b->weight.grad()));
  });
}

TEST(CheckpointModules, AsksThePolicyOnlyWhatItCanAnswer) {
  Net net;
  EXPECT_THAT(message_of<UsageError>([&] { activation::checkpoint_modules(net, wrap_classes({"Lynear"})); }),
              HasSubstr("no module of the class Lynear"));
  EXPECT_THAT(message_of<UsageError>([&] { activation::checkpoint_modules(net, WrapPolicy{}); }), HasSubstr("no function `chooses`"));
  auto merging = wrap_always();
  merging.merge_below = 10;
  EXPECT_THAT(message_of<UsageError>([&] { activation::checkpoint_modules(net, merging); }),
              HasSubstr("merge_below, which are for sharding"));
}

}  // namespace
}  // namespace tessera::testing::checkpoint_modules_test
