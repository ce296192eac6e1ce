// Activation checkpointing of parts of sharded models: every way to do it gives the gradients of the plain model. One way is Tessera's;
// the other is a Function as programs write it, which runs a forward and a backward pass inside of backward.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/shard/activation.h"
#include "tessera/shard/report.h"
#include "tests/testing/blocks.h"
#include "tests/testing/checkpoint_by_hand.h"
#include "tests/testing/net.h"

namespace tessera::testing::checkpointing_test {
namespace {

namespace nn = torch::nn;

using Run = SegmentFunction;

at::Tensor ours(const Run& run, const at::Tensor& x) {
  return activation::checkpoint(run, x);
}
at::Tensor plainly(const Run& run, const at::Tensor& x) {
  return run(x);
}

struct Plan {
  using Around = at::Tensor (*)(const Run& run, const at::Tensor& x);
  std::string name;
  std::vector<std::vector<int>> units;
  at::Tensor (*value)(Blocks& m, at::Tensor x, Around around);
  std::vector<uint64_t> reductions;  // of each unit in a step, with the Function: one for each graph that has a part of the unit
  uint64_t more_gathers = 0;         // in backward, with Tessera's way: segments in a segment run once more
  friend std::ostream& operator<<(std::ostream& out, const Plan& self) { return out << self.name; }
};

Run part(Blocks& m, size_t first, size_t last) {
  return [&m, first, last](at::Tensor x) {
    for (size_t i = first; i <= last; i++) x = m.block[i]->forward(x);
    return x;
  };
}

class Checkpointing : public ::testing::TestWithParam<Plan> {};

std::shared_ptr<Blocks> sharded_as(const Plan& plan, const Communicator& world) {
  const auto sharded = std::make_shared<Blocks>();
  for (const auto& members : plan.units) {
    std::vector<std::shared_ptr<nn::Module>> modules;
    for (const int i : members) modules.push_back(sharded->block[static_cast<size_t>(i)]);
    fully_shard(modules, {.mesh = world});
  }
  fully_shard(sharded, {.mesh = world});
  return sharded;
}

uint64_t gathers_of(Blocks& model) {
  uint64_t gathers = 0;
  for (const auto& unit : units(model)) gathers += unit->counters().gathers;
  return gathers;
}

TEST_P(Checkpointing, GivesTheGradientsOfThePlainModel) {
  const auto& plan = GetParam();
  with_ranks(2, [&](const Communicator& world) {
    for (const bool needs : {false, true}) {
      for (const auto around : {&ours, &checkpoint_by_hand}) {
        Blocks whole;
        const auto plain = sharded_as(plan, world), sharded = sharded_as(plan, world);
        for (int step = 0; step < 3; step++) {
          whole.zero_grad();
          sharded->zero_grad();
          reset_counters(*sharded);
          reset_counters(*plain);
          const auto x = numbers({5, 8}, step).set_requires_grad(needs), y = x.detach().clone().set_requires_grad(needs);
          plan.value(whole, x, &plainly).pow(2).mean().backward();
          plan.value(*sharded, y, around).pow(2).mean().backward();
          expect_same_gradients(*sharded, whole);
          if (needs) {
            EXPECT_TRUE(at::allclose(y.grad(), x.grad(), 1e-5, 1e-6));
          }
          expect_all_freed(*sharded);
          std::vector<uint64_t> reductions;
          for (const auto& unit : units(*sharded)) reductions.push_back(unit->counters().reductions);
          if (around == &checkpoint_by_hand) {
            EXPECT_EQ(reductions, plan.reductions);
            continue;
          }
          EXPECT_EQ(reductions, std::vector<uint64_t>(plan.units.size(), 1));
          plan.value(*plain, numbers({5, 8}, step).set_requires_grad(needs), &plainly).pow(2).mean().backward();
          // The first step does not know the order of uses yet.
          if (step == 0) continue;
          EXPECT_EQ(gathers_of(*sharded), gathers_of(*plain) + plan.more_gathers);
        }
      }
    }
  });
}

const std::vector<std::vector<int>> kEach = {{0}, {1}, {2}, {3}}, kPairs = {{0, 1}, {2, 3}};

INSTANTIATE_TEST_SUITE_P(
    Plans, Checkpointing,
    ::testing::Values(Plan{"EachBlock",
                           kEach,
                           [](Blocks& m, at::Tensor x, Plan::Around around) {
                             for (size_t i = 0; i < 4; i++) x = around(part(m, i, i), x);
                             return x;
                           },
                           {1, 1, 1, 1}},
                      Plan{"TwoBlocksInAUnit",
                           kPairs,
                           [](Blocks& m, at::Tensor x, Plan::Around around) {
                             for (size_t i = 0; i < 4; i++) x = around(part(m, i, i), x);
                             return x;
                           },
                           {2, 2}},
                      Plan{"AroundTwoUnits",
                           kEach,
                           [](Blocks& m, at::Tensor x, Plan::Around around) { return around(part(m, 2, 3), around(part(m, 0, 1), x)); },
                           {1, 1, 1, 1}},
                      Plan{"Nested",
                           kEach,
                           [](Blocks& m, at::Tensor x, Plan::Around around) {
                             const auto inner = [&m, around](const at::Tensor& t) {
                               return around(part(m, 2, 2), around(part(m, 1, 1), around(part(m, 0, 0), t)));
                             };
                             return around(inner, m.block[3]->forward(x));
                           },
                           {1, 1, 1, 1},
                           1},
                      Plan{"HalfOfAUnit",
                           kPairs,
                           [](Blocks& m, at::Tensor x, Plan::Around around) {
                             x = m.block[1]->forward(around(part(m, 0, 0), x));
                             return around(part(m, 3, 3), m.block[2]->forward(x));
                           },
                           {2, 2}},
                      Plan{"BlocksUsedTwice",
                           kEach,
                           [](Blocks& m, at::Tensor x, Plan::Around around) {
                             for (int i = 0; i < 2; i++) x = around(part(m, 2, 3), around(part(m, 0, 1), x));
                             return x;
                           },
                           {2, 2, 2, 2}},
                      Plan{"OncePlainlyOnceNot",
                           kEach,
                           [](Blocks& m, at::Tensor x, Plan::Around around) { return m.forward(around(part(m, 0, 3), x)); },
                           {2, 2, 2, 2}}),
    ::testing::PrintToStringParamName());

/// So deep that the engine continues in another thread.
at::Tensor nested_checkpoints(const Run& innermost, Plan::Around around, int depth, const at::Tensor& x) {
  if (depth == 0) return innermost(x);
  return around([=](const at::Tensor& t) { return nested_checkpoints(innermost, around, depth - 1, t); }, x);
}

#ifndef __SANITIZE_THREAD__  // the thread sanitizer allows no more than 64 locks of a thread
TEST(CheckpointedBackward, MayNestDeeperThanTheEngineKeepsInOneThread) {
  with_ranks(2, [](const Communicator& world) {
    Blocks whole;
    whole.forward(numbers({2, 8})).sum().backward();
    for (const auto around : {&ours, &checkpoint_by_hand}) {
      const auto sharded = sharded_blocks(world);
      const auto run = [&](const at::Tensor& x) { return sharded->forward(x); };
      nested_checkpoints(run, around, 80, numbers({2, 8}).set_requires_grad(true)).sum().backward();
      expect_same_gradients(*sharded, whole);
    }
  });
}
#endif

}  // namespace
}  // namespace tessera::testing::checkpointing_test
