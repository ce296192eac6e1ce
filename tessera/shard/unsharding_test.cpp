// When units are unsharded and resharded: the rule after forward, prefetching, and both by hand.
#include "tessera/shard/unsharding.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/reduction.h"
#include "tessera/shard/report.h"
#include "tests/testing/blocks.h"
#include "tests/testing/net.h"

namespace tessera::testing::unsharding_test {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using Rooted = RootedBlocks;

/// Blocks and a root in gathered memory.
std::shared_ptr<Rooted> sharded(ShardOptions options) {
  options.residence = Residence::Gathered;
  return sharded_rooted_blocks(options);
}

void train_step(Rooted& model, int batch = 0) {
  model.forward(numbers({3, 8}, batch)).pow(2).mean().backward();
}

/// All-gathers of a step of each of the blocks and the root, once the order is known.
std::vector<uint64_t> gathers_of_a_step(Rooted& model) {
  for (int step = 0; step < 2; step++) train_step(model);
  reset_counters(model);
  for (const auto& unit : units(model)) {
    const auto held = unit->schedule()->lock();
    unit->schedule()->done_reading(*unit);  // as a step does
  }
  train_step(model);
  std::vector<uint64_t> result;
  for (const auto& unit : units(model)) result.push_back(unit->counters().gathers);
  return result;
}

uint64_t held_bytes(const torch::nn::Module& model) {
  uint64_t bytes = 0;
  for (const auto& unit : units(model)) bytes += testing::held_bytes(*unit);
  return bytes;
}

uint64_t unsharded_bytes(const torch::nn::Module& model) {
  uint64_t bytes = 0;
  for (const auto& unit : units(model)) bytes += testing::unsharded_bytes(*unit);
  return bytes;
}

TEST(ReshardAfterForward, DecidesHowOftenUnitsAreGathered) {
  with_ranks(2, [](const Communicator& world) {
    using Gathers = std::vector<uint64_t>;
    EXPECT_EQ(gathers_of_a_step(*sharded({.mesh = world})), (Gathers{2, 2, 2, 2, 1}));
    // The root is used last in forward and first in backward.
    EXPECT_EQ(gathers_of_a_step(*sharded({.mesh = world, .reshard_after_forward = true})), (Gathers{2, 2, 2, 2, 1}));
    EXPECT_EQ(gathers_of_a_step(*sharded({.mesh = world, .reshard_after_forward = false})), (Gathers{1, 1, 1, 1, 1}));
  });
}

TEST(ReshardAfterForward, DecidesWhatIsKeptForBackward) {
  with_ranks(4, [](const Communicator& world) {
    const auto after_forward = [&](ReshardAfterForward rule) {
      const auto model = sharded({.mesh = world, .reshard_after_forward = rule});
      for (int step = 0; step < 2; step++) train_step(*model);
      const auto loss = model->forward(numbers({3, 8})).sum();
      return std::pair(held_bytes(*model), unsharded_bytes(*model));
    };
    const auto [all, size] = after_forward(false);
    EXPECT_EQ(all, size);
    const auto [halves, same_size] = after_forward(2);
    EXPECT_GT(halves, size / 2);
    EXPECT_LT(halves, size);
    const auto [least, also_same_size] = after_forward(true);
    EXPECT_LT(least, halves);
  });
}

TEST(ReshardAfterForward, OfANumberOfRanksGathersAmongThem) {
  with_ranks(4, [](const Communicator& world) {
    const auto gathered = [&](ReshardAfterForward rule) {
      const auto model = sharded({.mesh = world, .reshard_after_forward = rule});
      gathers_of_a_step(*model);
      return units(*model).front()->counters().gathered_bytes;  // of one block: 3/4 in forward, and in backward
    };
    const auto block = testing::unsharded_bytes(*units(*sharded({.mesh = world})).front());
    EXPECT_EQ(gathered(true), block * 3 / 4 * 2);
    EXPECT_EQ(gathered(2), block * 3 / 4 + block / 2);
    EXPECT_EQ(gathered(4), gathered(true));
    EXPECT_EQ(gathered(1), gathered(false));
    EXPECT_THAT([&] { sharded({.mesh = world, .reshard_after_forward = 3}); },
                ThrowsMessage<UsageError>(HasSubstr("groups of 3; give a divisor of 4")));
    EXPECT_THAT([&] { sharded({.mesh = world, .reshard_after_forward = 0}); }, ThrowsMessage<UsageError>(HasSubstr("groups of 0")));
  });
}

TEST(ReshardAfterForward, ChangesNoResult) {
  for (const int ranks : {1, 2, 4}) {
    with_ranks(ranks, [](const Communicator& world) {
      const auto trained = [&](ReshardAfterForward rule, MixedPrecision precision, Residence residence) {
        auto model = std::make_shared<Rooted>();
        const ShardOptions options{.mesh = world, .mixed_precision = precision, .residence = residence, .reshard_after_forward = rule};
        for (const auto& each : model->block) fully_shard(each, options);
        fully_shard(model, options);
        optim::SGD optimizer(parameters(*model), {.lr = 0.1, .momentum = 0.9});
        for (int step = 0; step < 4; step++) {
          train_step(*model, 2 * step + world.rank());
          if (step == 2) train_step(*model, world.rank());  // a second pass before the step
          optimizer.step();
          optimizer.zero_grad();
        }
        return full_parameter(model->head->weight);
      };
      for (const auto precision : {MixedPrecision{}, MixedPrecision{.param_dtype = at::kBFloat16}}) {
        const auto expected = trained(true, precision, Residence::Auto);
        std::vector<ReshardAfterForward> rules = {ReshardAfterForward{}, false, world.size()};
        if (world.size() == 4) rules.emplace_back(2);
        for (const auto& rule : rules) {
          for (const auto residence : {Residence::Gathered, Residence::Auto}) {
            EXPECT_TRUE(at::equal(trained(rule, precision, residence), expected));
          }
        }
      }
    });
  }
}

TEST(ReshardAfterForward, CanBeChangedLater) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded({.mesh = world});
    set_reshard_after_forward(*model, false);
    EXPECT_EQ(gathers_of_a_step(*model), (std::vector<uint64_t>{1, 1, 1, 1, 1}));
    set_reshard_after_forward(*model->block[1], true, Recurse::No);
    EXPECT_EQ(gathers_of_a_step(*model), (std::vector<uint64_t>{1, 2, 1, 1, 1}));
    EXPECT_THAT([&] { set_reshard_after_forward(*model->block[0]->a, true, Recurse::No); },
                ThrowsMessage<UsageError>(HasSubstr("no unit was made from module Linear itself; its parameters belong to unit 'block0'")));
    Rooted plain;
    EXPECT_THAT([&] { set_reshard_after_forward(plain, true); },
                ThrowsMessage<UsageError>(HasSubstr("module RootedBlocks is not sharded")));
  });
}

TEST(ReshardAfterBackward, KeepsUnitsForTheNextPassUntilTheyChange) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded({.mesh = world, .reshard_after_forward = false});
    set_reshard_after_backward(*model, ReshardAfterBackward::No);
    for (int step = 0; step < 2; step++) train_step(*model);
    reset_counters(*model);
    for (int pass = 0; pass < 3; pass++) train_step(*model);
    EXPECT_EQ(counters(*model).gathers, 0);
    const auto often = sharded({.mesh = world});
    set_reshard_after_backward(*often, ReshardAfterBackward::No);
    for (int step = 0; step < 3; step++) train_step(*often);
    reset_counters(*often);
    train_step(*often);
    EXPECT_EQ(counters(*often).gathers, 4) << "after forward all but the root are resharded";
    optim::SGD(parameters(*model), {.lr = 0.1}).step();
    train_step(*model);
    EXPECT_EQ(counters(*model).gathers, 5);
  });
}

TEST(Unshard, KeepsAUnitUntilItsFirstUseOrUntilItIsResharded) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded({.mesh = world});
    const torch::NoGradGuard no_grad;
    const auto held = [&](size_t unit) { return testing::held_bytes(*units(*model)[unit]) > 0; };
    const auto handle = unshard(*model->block[3]);
    handle.wait();
    EXPECT_TRUE(held(3));
    for (int i = 0; i < 3; i++) model->block[static_cast<size_t>(i)]->forward(numbers({1, 8}));
    EXPECT_TRUE(held(3));
    const auto before = units(*model)[3]->counters().gathers;
    model->block[3]->forward(numbers({1, 8}));
    EXPECT_EQ(units(*model)[3]->counters().gathers, before);
    unshard(*model->block[0]);
    reshard(*model->block[0]);
    EXPECT_FALSE(held(0));
    EXPECT_GE(counters(*model).cancelled, 1);
    EXPECT_THAT([&] { unshard(*model->block[0]->a); },
                ThrowsMessage<UsageError>(HasSubstr("unshard: no unit was made from module Linear itself")));
  });
}

TEST(Unshard, DoesNothingForARootWithoutParametersOfItsOwn) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded_blocks(world);
    const torch::NoGradGuard no_grad;
    unshard(*model).wait();
    expect_all_freed(*model);
    model->forward(numbers({1, 8}));
    const auto before = held_bytes(*model);
    reshard(*model);
    set_reshard_after_forward(*model, false, Recurse::No);
    set_reshard_after_backward(*model, ReshardAfterBackward::No, Recurse::No);
    set_requires_gradient_sync(*model, Required::No, Recurse::No);
    EXPECT_EQ(held_bytes(*model), before);
    const std::vector<std::shared_ptr<torch::nn::Module>> all = {model, model->block[2]}, none = {};
    set_modules_to_forward_prefetch(*model, all);
    set_modules_to_backward_prefetch(*model, all);
    set_modules_to_forward_prefetch(*model->block[0], all);
    set_modules_to_forward_prefetch(*model->block[0], none);
    const auto part = std::make_shared<Block>();
    EXPECT_THAT([&] { unshard(*part); }, ThrowsMessage<UsageError>(HasSubstr("module Block is not sharded")));
  });
}

/// Returns a character for each unit: '#' if it has unsharded memory now, else '.'.
std::string held_after(const Rooted& model) {
  std::string result;
  for (const auto& unit : units(model)) result += testing::held_bytes(*unit) > 0 ? '#' : '.';
  return result;
}

TEST(Prefetch, FollowsItsOptions) {
  with_ranks(2, [](const Communicator& world) {
    const auto after_first_uses = [&](ShardOptions options) {
      const auto model = sharded(std::move(options));
      const torch::NoGradGuard no_grad;
      for (int pass = 0; pass < 3; pass++) model->forward(numbers({1, 8}));
      for (const auto& each : model->block) reshard(*each);
      reshard(*model);
      model->block[0]->forward(numbers({1, 8}));
      return held_after(*model);
    };
    EXPECT_EQ(after_first_uses({.mesh = world}), "##...");
    EXPECT_EQ(after_first_uses({.mesh = world, .schedule = {.forward_prefetch = false}}), "#....");
    EXPECT_EQ(after_first_uses({.mesh = world, .schedule = {.max_live_units = 4, .prefetch_depth = 3}}), "####.");
    EXPECT_EQ(after_first_uses({.mesh = world, .schedule = {.prefetch_depth = 3}}), "##...");
    EXPECT_EQ(after_first_uses({.mesh = world, .schedule = {.prefetch_depth = 3, .limit_all_gathers = false}}), "####.");
    EXPECT_EQ(after_first_uses({.mesh = world, .schedule = {.max_live_units = 1}}), "#....");
    EXPECT_THAT([&] { sharded({.mesh = world, .schedule = {.prefetch_depth = 0}}); },
                ThrowsMessage<UsageError>(HasSubstr("prefetch_depth is 0")));
    EXPECT_THAT([&] { sharded({.mesh = world, .schedule = {.max_live_units = 0}}); },
                ThrowsMessage<UsageError>(HasSubstr("max_live_units is 0")));
  });
}

/// Returns which units are unsharded in the middle of the backward of block 2, and then when that of block 1 is about to begin.
std::string held_in_backward(const Communicator& world, BackwardPrefetch prefetch) {
  const auto model = sharded({.mesh = world, .reshard_after_forward = true, .schedule = {.backward_prefetch = prefetch}});
  std::string result;
  for (int step = 0; step < 3; step++) {
    auto x = numbers({3, 8}).set_requires_grad(true);
    for (size_t i = 0; i < 4; i++) {
      const auto inner = torch::tanh(model->block[i]->a(x));
      x = x + model->block[i]->b(inner);
      if (i == 2) inner.register_hook([&](const at::Tensor&) { result = held_after(*model) + " "; });
      if (i == 1) x.register_hook([&](const at::Tensor&) { result += held_after(*model); });
    }
    model->head(x).sum().backward();
  }
  return result;
}

TEST(Prefetch, OfBackwardIsBeforeOrAfterTheGradientsOrNotAtAll) {
  with_ranks(2, [](const Communicator& world) {
    EXPECT_EQ(held_in_backward(world, BackwardPrefetch::Pre), ".##.. .#...");
    EXPECT_EQ(held_in_backward(world, BackwardPrefetch::Post), "..#.. .#...");
    EXPECT_EQ(held_in_backward(world, BackwardPrefetch::None), "..#.. .....");
  });
}

TEST(Prefetch, OfListedModulesReplacesTheLearnedOrder) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded({.mesh = world, .schedule = {.max_live_units = 3}});
    const torch::NoGradGuard no_grad;
    for (int pass = 0; pass < 3; pass++) model->forward(numbers({1, 8}));
    for (const auto& each : model->block) reshard(*each);
    reshard(*model);
    const std::vector<std::shared_ptr<torch::nn::Module>> next = {model->block[2], model->block[3]};
    set_modules_to_forward_prefetch(*model->block[0], next);
    model->block[0]->forward(numbers({1, 8}));
    EXPECT_EQ(held_after(*model), "#.##.");
    reset_counters(*model);
    for (int i = 0; i < 3; i++) model->block[1]->forward(numbers({1, 8}));  // not the modules in the list
    for (const auto& each : model->block) reshard(*each);
    EXPECT_GE(counters(*model).cancelled, 2);
    const std::vector<std::shared_ptr<torch::nn::Module>> foreign = {sharded({.mesh = world})};
    EXPECT_THAT([&] { set_modules_to_backward_prefetch(*model->block[0], foreign); },
                ThrowsMessage<UsageError>(HasSubstr("of different models")));
  });
}

}  // namespace
}  // namespace tessera::testing::unsharding_test
