// When and how gradients are reduced: no_sync, replicas, divide factors, hooks.
#include "tessera/shard/reduction.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/call.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/local.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/recover.h"
#include "tessera/shard/report.h"
#include "tessera/shard/training.h"
#include "tessera/shard/unsharding.h"
#include "tests/testing/blocks.h"
#include "tests/testing/default_device.h"
#include "tests/testing/net.h"

namespace tessera::testing::reduction_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

struct Way {
  Mesh mesh;
  Residence residence = Residence::Auto;
  MixedPrecision precision = {};
};

std::shared_ptr<RootedBlocks> sharded(const Way& way) {
  return sharded_rooted_blocks({.mesh = way.mesh, .mixed_precision = way.precision, .residence = way.residence});
}

/// Calls the function with the residences, on worlds with and without replicas.
void with_ways(const std::function<void(const Communicator&, const Way&)>& act) {
  for (const int ranks : {1, 2, 4}) {
    with_ranks(ranks, [&](const Communicator& world) {
      for (const auto residence : {Residence::Gathered, Residence::Auto}) {
        act(world, {.mesh = world, .residence = residence});
        if (ranks == 4) act(world, {.mesh = Mesh(world, {.replicate = 2, .shard = 2}), .residence = residence});
      }
    });
  }
}

TEST(NoSync, AddsUpOnEachRankAndReducesOnce) {
  with_ways([](const Communicator& world, const Way& way) {
    const auto model = sharded(way);
    for (int step = 0; step < 2; step++) {  // in the second step, the order of units is known
      for (const auto& shard : parameters(*model)) shard.mutable_grad() = at::Tensor();
      reset_counters(*model);
      {
        const auto guard = no_sync(*model);
        loss_of(*model, world.rank()).backward();
        {
          const auto inner = no_sync(*model);
          loss_of(*model, 10 + world.rank()).backward();
        }
        EXPECT_FALSE(parameters(*model)[0].grad().defined());
        loss_of(*model, 20 + world.rank()).backward();
      }
      EXPECT_EQ(counters(*model).reductions, 0);
      loss_of(*model, 30 + world.rank()).backward();
      EXPECT_EQ(counters(*model).reductions, 5);
      expect_same_gradients(*model, whole_after(world.size(), {0, 1, 2, 3}));
      loss_of(*model, 40 + world.rank()).backward();  // adds to the shards as usual
      expect_same_gradients(*model, whole_after(world.size(), {0, 1, 2, 3, 4}));
    }
  });
}

TEST(NoSync, EndsWithAnException) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded({.mesh = world});
    try {
      const auto guard = no_sync(*model);
      throw std::runtime_error("a bad batch");
    } catch (const std::runtime_error&) {
    }
    loss_of(*model, world.rank()).backward();
    expect_same_gradients(*model, whole_after(2, {0}));
  });
}

TEST(NoSync, GuardsMayEndInAnyOrder) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded({.mesh = world});
    std::optional<NoSync> first, second;
    first.emplace(no_sync(*model));
    second.emplace(no_sync(*model));
    first.reset();
    loss_of(*model, world.rank()).backward();
    EXPECT_EQ(counters(*model).reductions, 0);
    second.reset();
    loss_of(*model, 10 + world.rank()).backward();
    expect_same_gradients(*model, whole_after(2, {0, 1}));
  });
}

TEST(NoSync, ForgetsNothingThatWasFrozenSince) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded({.mesh = world});
    optim::SGD optimizer(parameters(*model), {.lr = 0.1});
    {
      const auto guard = no_sync(*model);
      loss_of(*model, world.rank()).backward();
    }
    set_requires_grad(*model->block[1], Training::Frozen);
    loss_of(*model, 10 + world.rank()).backward();
    EXPECT_THAT([&] { optimizer.step(); }, ThrowsMessage<UsageError>(HasSubstr("unit 'block1' has gradients")));
    EXPECT_THAT(
        [&] { sync_gradients(*model); },
        ThrowsMessage<UsageError>(AllOf(HasSubstr("'block1.a.weight' was frozen while its gradient waited"), HasSubstr("zero_grad()"))));
    optimizer.zero_grad();
    loss_of(*model, 20 + world.rank()).backward();
    optimizer.step();
    EXPECT_FALSE(model->block[1]->parameters()[0].grad().defined());
  });
}

TEST(NoSync, EndsInZeroGrad) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded({.mesh = world});
    optim::SGD optimizer(parameters(*model), {.lr = 0.1});
    {
      const auto guard = no_sync(*model);
      loss_of(*model, world.rank()).backward();
    }
    optimizer.zero_grad();
    loss_of(*model, 10 + world.rank()).backward();
    expect_same_gradients(*model, whole_after(2, {1}));
  });
}

TEST(NoSync, EndsInZeroGradForTheParametersOfThatOptimizerOnly) {
  with_ranks(4, [](const Communicator& world) {
    for (const bool over_replicas : {false, true}) {
      auto net = seeded_net();
      fully_shard(net, {.mesh = Mesh(world, {.replicate = 2, .shard = 2})});
      optim::SGD one(parameters(*net->a), {.lr = 0.1}), other(parameters(*net->b), {.lr = 0.1});
      if (over_replicas) {
        set_requires_all_reduce(*net, Required::No);
        net(input(world.rank())).sum().backward();
        set_requires_all_reduce(*net, Required::Yes);
      } else {
        const auto guard = no_sync(*net);
        net(input(world.rank())).sum().backward();
      }
      one.zero_grad();
      net(input(10 + world.rank())).sum().backward();

      auto first = seeded_net(), second = seeded_net();
      for (int rank = 0; rank < 4; rank++) {
        (first(input(rank)).sum() / 4).backward();
        (second(input(10 + rank)).sum() / 4).backward();
      }
      EXPECT_TRUE(at::allclose(full_grad(net->a->weight), second->a->weight.grad(), 1e-5, 1e-6)) << over_replicas;
      EXPECT_TRUE(at::allclose(full_grad(net->b->weight), first->b->weight.grad() + second->b->weight.grad(), 1e-5, 1e-6)) << over_replicas;
    }
  });
}

TEST(NoSync, IsNoticedByOptimizersOfTorchInOtherUnits) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded({.mesh = world});
    torch::optim::SGD optimizer(parameters(*model), 0.1);
    {
      const auto guard = no_sync(*model);
      loss_of(*model, world.rank()).backward();
    }
    model->head(numbers({3, 8}, world.rank())).sum().backward();  // gradients of the blocks still wait for a reduction
    EXPECT_THAT([&] { optimizer.step(); }, ThrowsMessage<UsageError>(HasSubstr("unit 'block0' has gradients")));
  });
}

TEST(NoSync, KeepsSumsOfLowPrecisionInFloat32) {
  with_ranks(2, [](const Communicator& world) {
    for (const auto residence : {Residence::Gathered, Residence::Auto}) {
      const Way way{.mesh = world, .residence = residence, .precision = {.param_dtype = at::kBFloat16}};
      const auto model = sharded(way), apart = sharded(way);
      for (int pass = 0; pass < 4; pass++) {
        std::optional<NoSync> guard;
        if (pass < 3) guard.emplace(no_sync(*model));
        loss_of(*model, 10 * pass + world.rank()).backward();
        loss_of(*apart, 10 * pass + world.rank()).backward();
      }
      for (size_t i = 0; i < parameters(*model).size(); i++) {  // a sum in bfloat16 would differ by 1e-2
        EXPECT_TRUE(at::allclose(full_grad(parameters(*model)[i]), full_grad(parameters(*apart)[i]), 1e-6, 1e-6)) << "parameter " << i;
      }
    }
  });
}

TEST(NoSync, OfLowPrecisionOnSomeRanksIsNamed) {
  if (!on_cpu()) GTEST_SKIP() << "it needs memory that ranks share";
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded({.mesh = world, .precision = {.param_dtype = at::kBFloat16}});
    if (world.rank() == 0) {
      const auto guard = no_sync(*model);
      loss_of(*model, 0).backward();
    }
    EXPECT_THAT([&] { loss_of(*model, 1).backward(); }, ThrowsMessage<CommError>(HasSubstr("with unreduced gradients of earlier passes")));
  });
}

TEST(NoSync, OfLowPrecisionMayLeaveUnitsOutOnSomeRanks) {
  if (!on_cpu()) GTEST_SKIP() << "it needs memory that ranks share";
  with_ranks(2, [](const Communicator& world) {
    const auto some = [](RootedBlocks& model, int rank) {
      const auto x = model.block[0]->forward(numbers({3, 8}, rank));
      return (rank == 0 ? model.block[1]->forward(x) : x).to(at::kFloat).pow(2).mean();
    };
    RootedBlocks whole;
    for (int rank = 0; rank < 2; rank++) ((some(whole, rank) + loss_of(whole, 10 + rank)) / 2).backward();
    for (const bool by_switch : {false, true}) {
      const auto model = sharded({.mesh = world, .precision = {.param_dtype = at::kBFloat16}});
      if (by_switch) set_requires_gradient_sync(*model, Required::No);
      {
        std::optional<NoSync> guard;
        if (!by_switch) guard.emplace(no_sync(*model));
        some(*model, world.rank()).backward();
      }
      if (by_switch) set_requires_gradient_sync(*model, Required::Yes);
      model->forward(numbers({3, 8}, 10 + world.rank())).to(at::kFloat).pow(2).mean().backward();
      for (size_t i = 0; i < whole.parameters().size(); i++) {
        const auto expected = whole.parameters()[i].grad();
        EXPECT_LT((full_grad(parameters(*model)[i]) - expected).norm().item<double>(), 0.1 * expected.norm().item<double>()) << i;
      }
    }
  });
}

TEST(NoSync, IsForWholeModels) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded({.mesh = world});
    EXPECT_THAT(
        [&] { (void)no_sync(*model->block[0]); },
        ThrowsMessage<UsageError>(AllOf(HasSubstr("module Block is only a part of its model"), HasSubstr("set_requires_gradient_sync"))));
    const auto rootless = sharded_blocks(world);
    EXPECT_THAT([&] { (void)no_sync(*rootless->block[0]); }, ThrowsMessage<UsageError>(HasSubstr("only a part of its model")));
    RootedBlocks plain;
    EXPECT_THAT([&] { (void)no_sync(plain); }, ThrowsMessage<UsageError>(HasSubstr("is not sharded")));
  });
}

TEST(NoSync, OfAPartIsASwitch) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded({.mesh = world});
    set_requires_gradient_sync(*model->block[1], Required::No);
    loss_of(*model, world.rank()).backward();
    EXPECT_FALSE(model->block[1]->a->parameters()[0].grad().defined());
    EXPECT_TRUE(model->block[2]->a->parameters()[0].grad().defined());
    set_requires_gradient_sync(*model->block[1], Required::Yes);
    loss_of(*model, 10 + world.rank()).backward();
    expect_same_gradients(*model, whole_after(2, {0, 1}));
  });
}

TEST(UnsyncedGradients, CanBeReducedWithoutAPassAndAreNeverLeftOut) {
  with_ways([](const Communicator& world, const Way& way) {
    const auto model = sharded(way);
    optim::SGD ours(parameters(*model), {.lr = 0.1});
    torch::optim::SGD theirs(parameters(*model), 0.1);
    {
      const auto guard = no_sync(*model);
      loss_of(*model, world.rank()).backward();
    }
    const auto refused = ThrowsMessage<UsageError>(AllOf(HasSubstr("unit 'block0' has gradients of backward passes that were not reduced"),
                                                         HasSubstr("tessera::sync_gradients(model)")));
    EXPECT_THAT([&] { (void)ours.clip_grad_norm(1); }, refused);
    EXPECT_THAT([&] { ours.step(); }, refused);
    EXPECT_THAT([&] { ours.skip_step(); }, refused);
    EXPECT_THAT([&] { skip_step(*model); }, refused);
    EXPECT_THAT([&] { set_gradient_divide_factors(*model, {.pre = 1, .post = 1}); }, refused);
    EXPECT_THAT([&] { set_reduction_hook(*model, [](const PackedGradient&) {}); }, refused);
    parameters(*model)[0].mutable_grad() = at::zeros_like(to_local(parameters(*model)[0]));
    EXPECT_THAT([&] { theirs.step(); }, refused);
    parameters(*model)[0].mutable_grad() = at::Tensor();
    sync_gradients(*model);
    expect_same_gradients(*model, whole_after(world.size(), {0}));
    const auto reductions = counters(*model).reductions;
    sync_gradients(*model);  // nothing is left
    EXPECT_EQ(counters(*model).reductions, reductions);
    ours.step();
    {
      const auto guard = no_sync(*model);
      loss_of(*model, world.rank()).backward();
    }
    recover(*model);
    ours.zero_grad();
    reset_counters(*model);
    ours.skip_step();  // nothing is pending any more
    EXPECT_EQ(counters(*model).reductions, 0);
  });
}

TEST(AllReduce, MayWaitUntilTheLastPass) {
  with_ranks(4, [](const Communicator& world) {
    for (const auto residence : {Residence::Gathered, Residence::Auto}) {
      const auto model = sharded({.mesh = Mesh(world, {.replicate = 2, .shard = 2}), .residence = residence});
      const auto replicas = units(*model).front()->mesh().replicate();
      set_requires_all_reduce(*model, Required::No);
      replicas.reset_traffic();
      for (int pass = 0; pass < 3; pass++) loss_of(*model, 10 * pass + world.rank()).backward();
      EXPECT_EQ(replicas.traffic(Operation::AllReduce).calls, 0);
      EXPECT_FALSE(parameters(*model)[0].grad().defined());
      EXPECT_THAT([&] { optim::SGD(parameters(*model), {.lr = 0.1}).clip_grad_norm(1); },
                  ThrowsMessage<UsageError>(HasSubstr("not reduced")));
      set_requires_all_reduce(*model, Required::Yes);
      loss_of(*model, 30 + world.rank()).backward();
      EXPECT_EQ(replicas.traffic(Operation::AllReduce).calls, 5);
      expect_same_gradients(*model, whole_after(4, {0, 1, 2, 3}));

      set_requires_all_reduce(*model, Required::No);
      loss_of(*model, 40 + world.rank()).backward();
      sync_gradients(*model);
      expect_same_gradients(*model, whole_after(4, {0, 1, 2, 3, 4}));
    }
  });
}

TEST(DivideFactors, AreThoseOfFsdp) {
  const auto factors = [](int ranks) {
    const auto [pre, post] = default_divide_factors(ranks);
    return std::pair(pre, post);
  };
  EXPECT_EQ(factors(1), std::pair(1.0, 1.0));
  EXPECT_EQ(factors(2), std::pair(2.0, 1.0));
  EXPECT_EQ(factors(3), std::pair(2.0, 1.5));
  EXPECT_EQ(factors(4), std::pair(2.0, 2.0));
  EXPECT_EQ(factors(6), std::pair(4.0, 1.5));
  EXPECT_EQ(factors(7), std::pair(2.0, 3.5));
  EXPECT_EQ(factors(8), std::pair(4.0, 2.0));
}

TEST(DivideFactors, OfTheDefaultGiveTheBitsOfTheMean) {
  if (!on_cpu()) GTEST_SKIP() << "GPUs divide by multiplying";
  for (const int ranks : {1, 2, 3, 4, 6, 7}) {
    with_ranks(ranks, [&](const Communicator& world) {
      const auto plain = sharded({.mesh = world}), divided = sharded({.mesh = world});
      set_gradient_divide_factors(*divided, default_divide_factors(ranks));
      loss_of(*plain, world.rank()).backward();
      loss_of(*divided, world.rank()).backward();
      for (size_t i = 0; i < parameters(*plain).size(); i++) {
        EXPECT_TRUE(at::equal(full_grad(parameters(*plain)[i]), full_grad(parameters(*divided)[i]))) << ranks << " ranks, parameter " << i;
      }
    });
  }
}

TEST(DivideFactors, ScaleGradients) {
  with_ways([](const Communicator& world, const Way& way) {
    const auto model = sharded(way);
    set_gradient_divide_factors(*model, {.pre = 4, .post = 0.5});
    loss_of(*model, world.rank()).backward();
    expect_same_gradients(*model, whole_after(world.size(), {0}), world.size() / 2.0);
    EXPECT_THAT([&] { set_gradient_divide_factors(*model, {.pre = 0, .post = 1}); },
                ThrowsMessage<UsageError>(HasSubstr("gradients can't be divided by 0")));
  });
}

TEST(DivideFactors, ThatDifferByRankAreNamed) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded({.mesh = world});
    set_gradient_divide_factors(*model, {.pre = 1, .post = 1.0 + world.rank()});
    EXPECT_THAT([&] { loss_of(*model, world.rank()).backward(); }, ThrowsMessage<CommError>(HasSubstr("divided by 1 and 2")));
  });
}

TEST(DivideFactors, CanBeSetForAPart) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded({.mesh = world});
    set_gradient_divide_factors(*model->block[0], {.pre = 1, .post = 1});
    loss_of(*model, world.rank()).backward();
    const auto expected = whole_after(2, {0});
    EXPECT_TRUE(at::allclose(full_grad(parameters(*model)[0]), expected.parameters()[0].grad() * 2, 1e-6, 1e-6));
    EXPECT_TRUE(at::allclose(full_grad(parameters(*model)[4]), expected.parameters()[4].grad(), 1e-6, 1e-6));
  });
}

/// Sends gradients in bfloat16, and adds them in float32.
void compress(const PackedGradient& gradient) {
  const auto narrow = gradient.whole.to(at::kBFloat16);
  const auto sum = at::empty({gradient.shard.numel()}, at::kFloat);
  const Piece piece{.whole = narrow, .own = sum};
  gradient.mesh.shard().reduce_scatter(std::span(&piece, 1), {.op = Reduce::Mean}, {.unit = gradient.unit}).wait();
  at::Tensor(gradient.shard).copy_(sum);
}

TEST(ReductionHook, ReplacesTheReduction) {
  with_ranks(2, [](const Communicator& world) {
    for (const auto residence : {Residence::Gathered, Residence::Auto}) {
      const auto model = sharded({.mesh = world, .residence = residence});
      std::set<std::string> seen;
      set_reduction_hook(*model, [&](const PackedGradient& gradient) {
        seen.insert(gradient.unit);
        compress(gradient);
      });
      loss_of(*model, world.rank()).backward();
      EXPECT_EQ(seen, (std::set<std::string>{"RootedBlocks", "block0", "block1", "block2", "block3"}));
      expect_same_gradients(*model, whole_after(2, {0}), 1, 5e-2);
      EXPECT_FALSE(at::allclose(full_grad(parameters(*model)[0]), whole_after(2, {0}).parameters()[0].grad(), 1e-5, 1e-5));
      set_reduction_hook(*model, {});
      for (const auto& shard : parameters(*model)) shard.mutable_grad() = at::Tensor();
      loss_of(*model, world.rank()).backward();
      expect_same_gradients(*model, whole_after(2, {0}));
    }
    const auto model = sharded({.mesh = world});
    set_reduction_hook(*model, &compress);
    auto& block = *model->block[0];
    const auto pass = [&] { return world.rank() == 0 ? block.a(numbers({3, 8})) : block.forward(numbers({3, 8})); };
    EXPECT_THAT([&] { pass().sum().backward(); }, ThrowsMessage<CommError>(HasSubstr("different parameters")));
    recover(*model);
    EXPECT_THAT([&] { set_gradient_divide_factors(*model, {.pre = 1, .post = 2}); },
                ThrowsMessage<UsageError>(HasSubstr("has a reduction hook")));
    EXPECT_THAT([&] { set_requires_all_reduce(*model, Required::No); }, ThrowsMessage<UsageError>(HasSubstr("has a reduction hook")));
    set_reduction_hook(*model, {});
    set_gradient_divide_factors(*model, {.pre = 1, .post = 2});
    EXPECT_THAT([&] { set_reduction_hook(*model, &compress); }, ThrowsMessage<UsageError>(HasSubstr("has divide factors")));
  });
}

TEST(GradientHook, IsCalledOnceForEachGradientThatArrives) {
  with_ranks(2, [](const Communicator& world) {
    for (const auto unused : {UnusedParameters::Refuse, UnusedParameters::Zeros}) {
      const auto model = sharded_rooted_blocks({.mesh = world, .schedule = {.unused_parameters = unused}});
      int calls = 0;
      for (const auto& shard : parameters(*model)) {
        register_gradient_hook(shard, [&](const at::Tensor& hooked) {
          EXPECT_TRUE(hooked.grad().defined());
          calls++;
        });
      }
      const auto all = static_cast<int>(parameters(*model).size());
      for (int pass = 1; pass <= 3; pass++) {
        loss_of(*model, world.rank()).backward();
        EXPECT_EQ(calls, pass * all);
      }
      calls = 0;
      model->head(numbers({3, 8}, world.rank())).sum().backward();
      EXPECT_EQ(calls, unused == UnusedParameters::Zeros ? all : 2);
    }
  });
}

TEST(GradientHook, SeesEachFinishedGradient) {
  with_ways([](const Communicator& world, const Way& way) {
    const auto model = sharded(way);
    const auto shards = parameters(*model);
    std::vector<at::Tensor> seen(shards.size());
    for (size_t i = 0; i < shards.size(); i++) {
      register_gradient_hook(shards[i], [&, i](const at::Tensor& shard) { seen[i] = to_local(shard.grad()); });
    }
    loss_of(*model, world.rank()).backward();
    for (size_t i = 0; i < shards.size(); i++) {
      ASSERT_TRUE(seen[i].defined()) << i;
      EXPECT_TRUE(at::equal(seen[i], to_local(shards[i].grad())));
    }
    expect_same_gradients(*model, whole_after(world.size(), {0}));
    const auto refused = [](const at::Tensor& shard, std::function<void(const at::Tensor&)> hook, const std::string& why) {
      EXPECT_THAT([&] { register_gradient_hook(shard, hook); }, ThrowsMessage<UsageError>(HasSubstr(why)));
    };
    const auto nothing = [](const at::Tensor&) {};
    refused(shards[0] * 1, nothing, "takes trained parameters");
    refused(shards[0], {}, "an empty function");
    set_requires_grad(*model->block[0], Training::Frozen);
    refused(shards[0], nothing, "'block0.a.weight' is frozen");
  });
}

}  // namespace
}  // namespace tessera::testing::reduction_test
