// The costs of a step follow a formula at every size of the world: gathers, reductions, bytes received and bytes sent.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/comm/communicator.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/report.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"
#include "tests/testing/blocks.h"
#include "tests/testing/default_device.h"
#include "tests/testing/net.h"
#include "tests/testing/residences.h"

namespace tessera::testing::formula_test {
namespace {

namespace nn = torch::nn;

/// Each of the four blocks becomes a unit. The rest becomes the root unit, which is used at both ends of a pass.
struct Model : nn::Module {
  nn::Linear embed{nullptr}, head{nullptr};
  std::shared_ptr<Blocks> blocks;
  Model() {
    embed = register_module("embed", nn::Linear(5, 8));
    blocks = register_module("blocks", std::make_shared<Blocks>());
    head = register_module("head", nn::Linear(8, 3));
    fill_with_numbers(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return head(blocks->forward(embed(x))); }
};

uint64_t up(uint64_t count, uint64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

/// The number of values in one rank's chunk. Every parameter begins at a multiple of 64 bytes of float32, and so does every chunk, in
/// whatever dtype it is sent.
uint64_t chunk_values(const std::vector<uint64_t>& parameters, uint64_t ranks) {
  uint64_t total = 0;
  for (const auto numel : parameters) total += up(numel, 16);
  return up((total + ranks - 1) / ranks, 16);
}

const std::vector<uint64_t> kBlock = {8 * 16, 16, 16 * 8, 8}, kRoot = {5 * 8, 8, 8 * 3, 3};

struct Numbers {
  std::string name;
  MixedPrecision precision;
  uint64_t gathered = 4, reduced = 4;  // bytes per value that is sent
  friend std::ostream& operator<<(std::ostream& out, const Numbers& self) { return out << self.name; }
};

class Formula : public ::testing::TestWithParam<std::tuple<Numbers, Residence>> {};

TEST_P(Formula, HoldsForGathersReductionsAndBytes) {
  const auto& [numbers_are, residence] = GetParam();
  for (const int ranks : {1, 2, 3, 4, 7}) {
    SCOPED_TRACE(std::to_string(ranks) + " ranks");
    // Units whose unsharded form lies in memory all the time count gathers, but move no bytes.
    const bool shared = residence == Residence::NodeShared || (ranks == 1 && !on_cpu());
    with_ranks(ranks, [&, &numbers_are = numbers_are, &residence = residence](const Communicator& world) {
      Model model;
      const ShardOptions options{.mesh = world, .mixed_precision = numbers_are.precision, .residence = residence};
      for (const auto& block : model.blocks->block) fully_shard(block, options);
      fully_shard(model, options);
      const auto count = static_cast<uint64_t>(ranks), others = count - 1;
      const auto block = chunk_values(kBlock, count), root = chunk_values(kRoot, count);

      for (int step = 0; step < 4; step++) {
        reset_counters(model);
        world.reset_traffic();
        model.forward(numbers({6, 5}, step)).pow(2).mean().backward();
        if (step == 0) continue;  // the order of uses is not known yet
        for (const auto& unit : units(model)) {
          // One gather in forward, and one in backward if the unit was resharded in between. The root is used last, so it is still
          // unsharded.
          EXPECT_EQ(unit->counters().gathers, unit->name() == "Model" ? 1 : 2) << unit->name() << ", step " << step;
          EXPECT_EQ(unit->counters().reductions, 1) << unit->name();
        }
        const auto gathered = shared ? 0 : others * numbers_are.gathered * (4 * 2 * block + root);
        const auto reduced = others * numbers_are.reduced * (4 * block + root);
        EXPECT_EQ(counters(model).gathers, 9);
        EXPECT_EQ(counters(model).reductions, 5);
        EXPECT_EQ(counters(model).misses, 0);
        EXPECT_EQ(counters(model).gathered_bytes, gathered);
        EXPECT_EQ(world.traffic(Operation::AllGather).calls, shared ? 0 : 9);
        EXPECT_EQ(world.traffic(Operation::AllGather).bytes, gathered);
        EXPECT_EQ(world.traffic(Operation::ReduceScatter).calls, 5);
        EXPECT_EQ(world.traffic(Operation::ReduceScatter).bytes, reduced);
        EXPECT_EQ(world.traffic(Operation::AllReduce).calls, 0);
      }

      const torch::NoGradGuard no_grad;
      for (int pass = 0; pass < 3; pass++) {
        reset_counters(model);
        world.reset_traffic();
        model.forward(numbers({6, 5}, pass));
        world.barrier();  // until all gathers that were started for the next pass have arrived
        EXPECT_LE(counters(model).gathers, 6) << "one for each unit, and a second one of the root, for its head";
        EXPECT_EQ(world.traffic(Operation::AllGather).bytes, counters(model).gathered_bytes);
        EXPECT_EQ(world.traffic(Operation::ReduceScatter).calls, 0);
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(
    Dtypes, Formula,
    ::testing::Combine(::testing::Values(Numbers{.name = "Float32", .precision = {}},
                                         Numbers{
                                             .name = "Bfloat16", .precision = {.param_dtype = at::kBFloat16}, .gathered = 2, .reduced = 2},
                                         Numbers{.name = "Bfloat16BothWays",
                                                 .precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kBFloat16},
                                                 .gathered = 2,
                                                 .reduced = 2}),
                       ::testing::ValuesIn(residences())),
    [](const auto& info) {
      return std::get<0>(info.param).name + (std::get<1>(info.param) == Residence::Gathered ? "_Gathered" : "_NodeShared");
    });

/// A gradient with respect to a weight does not need the weight. Only the gradient with respect to a layer's input does.
TEST(FirstLayer, IsNotGatheredInBackward) {
  for (const auto residence : residences()) {
    with_ranks(2, [&](const Communicator& world) {
      const ShardOptions options{.mesh = world, .residence = residence};
      auto net = seeded_net();
      for (const auto& child : net->children()) fully_shard(child, options);
      fully_shard(net, options);
      for (int step = 0; step < 3; step++) {
        reset_counters(*net);
        net(input()).sum().backward();
        if (step == 0) continue;  // the order of uses is not known yet
        const auto gathers = [&](size_t unit) { return units(*net)[unit]->counters().gathers; };
        EXPECT_EQ(gathers(0), 1);
        EXPECT_EQ(gathers(1), 2);
        EXPECT_EQ(gathers(2), 1) << "the last layer is still unsharded when backward begins";
        EXPECT_EQ(counters(*net).misses, 0);
      }
    });
  }
}

/// Backward needs frozen layers in front of trained ones even after all gradients of their unit are complete.
TEST(FrozenLayers, AreNotGatheredAgainWhenGradientsAreComplete) {
  with_ranks(2, [&](const Communicator& world) {
    Blocks blocks;
    for (const auto& block : blocks.block) {
      for (auto& parameter : block->a->parameters()) parameter.set_requires_grad(false);
      fully_shard(block, {.mesh = world, .residence = Residence::Gathered});
    }
    for (int step = 0; step < 4; step++) {
      reset_counters(blocks);
      blocks.forward(numbers({6, 8}, step).set_requires_grad(true)).pow(2).mean().backward();
      if (step == 0) continue;  // the schedule does not know yet that the frozen layers are needed
      for (size_t i = 0; i < 4; i++) {
        EXPECT_EQ(units(blocks)[i]->counters().gathers, i == 3 ? 1 : 2) << "block " << i << ", step " << step;
      }
    }
  });
}

}  // namespace
}  // namespace tessera::testing::formula_test
