// When and how gradients are reduced: no_sync, replicas, divide factors, hooks, unused parameters, phases.
#include "tessera/shard/reduction.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/call.h"
#include "tessera/shard/local.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/recover.h"
#include "tessera/shard/report.h"
#include "tessera/shard/training.h"
#include "tessera/shard/unsharding.h"
#include "tessera/testing/blocks.h"
#include "tessera/testing/net.h"

namespace tessera::testing::reduction_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using Batches = std::vector<int>;

at::Tensor loss_of(RootedBlocks& model, int batch) {
  return model.forward(numbers({3, 8}, batch)).pow(2).mean();
}

/// The gradients of an unsharded model for the sum, over the batches of each rank, of the mean over the ranks.
std::vector<at::Tensor> expected_gradients(int ranks, const Batches& batches) {
  RootedBlocks model;
  for (const int batch : batches) {
    for (int rank = 0; rank < ranks; rank++) (loss_of(model, 10 * batch + rank) / ranks).backward();
  }
  std::vector<at::Tensor> result;
  for (const auto& parameter : model.parameters()) result.push_back(parameter.grad());
  return result;
}

void expect_gradients(const RootedBlocks& model, const std::vector<at::Tensor>& expected, double factor = 1, double tolerance = 1e-6) {
  const auto shards = parameters(model);
  for (size_t i = 0; i < shards.size(); i++) {
    ASSERT_TRUE(shards[i].grad().defined()) << i;
    const auto found = full_grad(shards[i]);
    EXPECT_TRUE(at::allclose(found, expected[i] * factor, tolerance, tolerance))
        << "parameter " << i << " differs by " << (found - expected[i] * factor).abs().max().item<float>();
  }
}

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
    for (int step = 0; step < 2; step++) {  // the second one with known orders
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
      expect_gradients(*model, expected_gradients(world.size(), {0, 1, 2, 3}));
      loss_of(*model, 40 + world.rank()).backward();  // adds to the shards as usual
      expect_gradients(*model, expected_gradients(world.size(), {0, 1, 2, 3, 4}));
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
    expect_gradients(*model, expected_gradients(2, {0}));
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
    expect_gradients(*model, expected_gradients(2, {0, 1}));
  });
}

TEST(NoSync, ForgetsWhatWasFrozenSince) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded({.mesh = world});
    optim::SGD optimizer(parameters(*model), {.lr = 0.1});
    {
      const auto guard = no_sync(*model);
      loss_of(*model, world.rank()).backward();
    }
    set_requires_grad(*model->block[1], Training::Frozen);
    loss_of(*model, 10 + world.rank()).backward();
    optimizer.step();
    EXPECT_FALSE(model->block[1]->parameters()[0].grad().defined());
  });
}

TEST(NoSync, KeepsSumsOfLowPrecisionInFloat32) {
  with_ranks(2, [](const Communicator& world) {
    for (const auto residence : {Residence::Gathered, Residence::Auto}) {
      const Way way{.mesh = world, .residence = residence, .precision = {.param_dtype = at::kBFloat16}};
      const auto model = sharded(way), apart = sharded(way);
      std::vector<at::Tensor> expected;
      for (int pass = 0; pass < 4; pass++) {
        std::optional<NoSync> guard;
        if (pass < 3) guard.emplace(no_sync(*model));
        loss_of(*model, 10 * pass + world.rank()).backward();
        loss_of(*apart, 10 * pass + world.rank()).backward();
      }
      for (const auto& shard : parameters(*apart)) expected.push_back(full_grad(shard));
      expect_gradients(*model, expected, 1, 1e-6);  // a sum in bfloat16 would differ by 1e-2
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
    EXPECT_THAT([&] { (void)no_sync(RootedBlocks()); }, ThrowsMessage<UsageError>(HasSubstr("is not sharded")));
  });
}

TEST(NoSync, OfAPartIsASwitch) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded({.mesh = world});
    set_requires_gradient_sync(*model->block[1], false);
    loss_of(*model, world.rank()).backward();
    EXPECT_FALSE(model->block[1]->a->parameters()[0].grad().defined());
    EXPECT_TRUE(model->block[2]->a->parameters()[0].grad().defined());
    set_requires_gradient_sync(*model->block[1], true);
    loss_of(*model, 10 + world.rank()).backward();
    expect_gradients(*model, expected_gradients(2, {0, 1}));
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
    expect_gradients(*model, expected_gradients(world.size(), {0}));
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
    ours.step();  // nothing is pending any more
    EXPECT_EQ(counters(*model).reductions, 0);
  });
}

TEST(AllReduce, MayWaitUntilTheLastPass) {
  with_ranks(4, [](const Communicator& world) {
    for (const auto residence : {Residence::Gathered, Residence::Auto}) {
      const auto model = sharded({.mesh = Mesh(world, {.replicate = 2, .shard = 2}), .residence = residence});
      const auto replicas = units(*model).front()->mesh().replicate();
      set_requires_all_reduce(*model, false);
      replicas.reset_traffic();
      for (int pass = 0; pass < 3; pass++) loss_of(*model, 10 * pass + world.rank()).backward();
      EXPECT_EQ(replicas.traffic(Operation::AllReduce).calls, 0);
      EXPECT_FALSE(parameters(*model)[0].grad().defined());
      EXPECT_THAT([&] { optim::SGD(parameters(*model), {.lr = 0.1}).clip_grad_norm(1); },
                  ThrowsMessage<UsageError>(HasSubstr("not reduced")));
      set_requires_all_reduce(*model, true);
      loss_of(*model, 30 + world.rank()).backward();
      EXPECT_EQ(replicas.traffic(Operation::AllReduce).calls, 5);
      expect_gradients(*model, expected_gradients(4, {0, 1, 2, 3}));

      set_requires_all_reduce(*model, false);
      loss_of(*model, 40 + world.rank()).backward();
      sync_gradients(*model);
      expect_gradients(*model, expected_gradients(4, {0, 1, 2, 3, 4}));
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
    expect_gradients(*model, expected_gradients(world.size(), {0}), world.size() / 2.0);
    EXPECT_THAT([&] { set_gradient_divide_factors(*model, {.pre = 0, .post = 1}); },
                ThrowsMessage<UsageError>(HasSubstr("gradients can't be divided by 0")));
  });
}

TEST(DivideFactors, CanBeSetForAPart) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded({.mesh = world});
    set_gradient_divide_factors(*model->block[0], {.pre = 1, .post = 1});
    loss_of(*model, world.rank()).backward();
    const auto expected = expected_gradients(2, {0});
    EXPECT_TRUE(at::allclose(full_grad(parameters(*model)[0]), expected[0] * 2, 1e-6, 1e-6));
    EXPECT_TRUE(at::allclose(full_grad(parameters(*model)[4]), expected[4], 1e-6, 1e-6));
  });
}

/// The last rank uses everything. Others use parts of the first and third block, and of the others what `whole` says.
at::Tensor loss_of_some(RootedBlocks& model, int rank, int ranks, int batch, bool whole = true) {
  auto x = numbers({3, 8}, batch);
  for (size_t i = 0; i < model.block.size(); i++) {
    if (rank == ranks - 1) {
      x = model.block[i]->forward(x);
    } else if (i % 2 == 0) {
      x = x + model.block[i]->a(x).narrow(1, 0, 8);
    } else if (whole) {
      x = model.block[i]->forward(x);
    }
  }
  return rank == 0 && !whole ? x.pow(2).mean() : model.head(x).pow(2).mean();
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
      expect_gradients(*model, expected_gradients(2, {0}), 1, 1e-2);
      EXPECT_FALSE(at::allclose(full_grad(parameters(*model)[0]), expected_gradients(2, {0})[0], 1e-5, 1e-5));
      set_reduction_hook(*model, {});
      for (const auto& shard : parameters(*model)) shard.mutable_grad() = at::Tensor();
      loss_of(*model, world.rank()).backward();
      expect_gradients(*model, expected_gradients(2, {0}));
    }
    const auto model = sharded({.mesh = world});
    set_reduction_hook(*model, &compress);
    EXPECT_THAT([&] { loss_of_some(*model, world.rank(), 2, 0).backward(); }, ThrowsMessage<CommError>(HasSubstr("different parameters")));
    recover(*model);
    EXPECT_THAT([&] { set_gradient_divide_factors(*model, {.pre = 1, .post = 2}); },
                ThrowsMessage<UsageError>(HasSubstr("has a reduction hook")));
    EXPECT_THAT([&] { set_requires_all_reduce(*model, false); }, ThrowsMessage<UsageError>(HasSubstr("has a reduction hook")));
    set_reduction_hook(*model, {});
    set_gradient_divide_factors(*model, {.pre = 1, .post = 2});
    EXPECT_THAT([&] { set_reduction_hook(*model, &compress); }, ThrowsMessage<UsageError>(HasSubstr("has divide factors")));
  });
}

TEST(GradientHook, SeesEachFinishedGradient) {
  with_ways([](const Communicator& world, const Way& way) {
    const auto model = sharded(way);
    const auto expected = expected_gradients(world.size(), {0});
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
    expect_gradients(*model, expected);
    EXPECT_THAT([&] { register_gradient_hook(at::ones({2}), [](const at::Tensor&) {}); },
                ThrowsMessage<UsageError>(HasSubstr("takes trained parameters")));
  });
}

TEST(UnusedParameters, CountAsZeroIfAsked) {
  for (const int ranks : {1, 2, 3}) {
    with_ranks(ranks, [&](const Communicator& world) {
      for (const auto residence : {Residence::Gathered, Residence::Auto}) {
        RootedBlocks whole;
        const auto model = sharded_rooted_blocks({.mesh = world, .residence = residence, .unused_parameters = UnusedParameters::Zeros});
        for (int pass = 0; pass < 3; pass++) {
          // A gather needs all ranks, so that all have to use the same units of gathered memory.
          const bool same_units = residence == Residence::Gathered;
          loss_of_some(*model, world.rank(), ranks, 10 * pass + world.rank(), same_units).backward();
          for (int rank = 0; rank < ranks; rank++) (loss_of_some(whole, rank, ranks, 10 * pass + rank, same_units) / ranks).backward();
        }
        std::vector<at::Tensor> expected;
        for (const auto& parameter : whole.parameters()) {
          expected.push_back(parameter.grad().defined() ? parameter.grad() : at::zeros_like(parameter));
        }
        expect_gradients(*model, expected, 1, 1e-5);
        // A pass that asks for gradients of inputs alone reduces nothing.
        const auto before = counters(*model).reductions;
        const auto x = numbers({3, 8}).set_requires_grad(true);
        (void)torch::autograd::grad({model->forward(x).sum()}, {x});
        EXPECT_EQ(counters(*model).reductions, before);
      }
    });
  }
}

TEST(UnusedParameters, AreAnErrorOtherwise) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded({.mesh = world});
    EXPECT_THAT([&] { loss_of_some(*model, world.rank(), 2, 0).backward(); }, ThrowsMessage<CommError>(HasSubstr("block")));
  });
}

TEST(UnusedParameters, LeaveSwitchesAlone) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded_rooted_blocks({.mesh = world, .unused_parameters = UnusedParameters::Zeros});
    set_requires_gradient_sync(*model->block[1], false);
    loss_of(*model, world.rank()).backward();
    EXPECT_FALSE(model->block[1]->parameters()[0].grad().defined());
    EXPECT_TRUE(model->block[0]->parameters()[0].grad().defined());
    set_requires_gradient_sync(*model->block[1], true);
    loss_of(*model, 10 + world.rank()).backward();
    expect_gradients(*model, expected_gradients(2, {0, 1}));
    EXPECT_THAT([&] { (void)torch::autograd::grad({loss_of(*model, 0)}, {parameters(*model)[0]}, {}, false, false, true); },
                ThrowsMessage<UsageError>(HasSubstr("they can't be asked for by autograd::grad")));
  });
}

TEST(UnusedParameters, AreReducedByAllRanksIfSomeRankHasKeptGradients) {
  with_ranks(2, [](const Communicator& world) {
    RootedBlocks whole;
    const auto model = sharded_rooted_blocks({.mesh = world, .unused_parameters = UnusedParameters::Zeros});
    {
      const auto guard = no_sync(*model);
      loss_of_some(*model, world.rank(), 2, world.rank(), /*whole=*/false).backward();
    }
    sync_gradients(*model);
    for (int rank = 0; rank < 2; rank++) (loss_of_some(whole, rank, 2, rank, /*whole=*/false) / 2).backward();
    std::vector<at::Tensor> expected;
    for (const auto& parameter : whole.parameters()) expected.push_back(parameter.grad());
    expect_gradients(*model, expected, 1, 1e-5);
  });
}

TEST(UnusedParameters, MayBeMixedWithNoSync) {
  with_ranks(2, [](const Communicator& world) {
    RootedBlocks whole;
    const auto model = sharded_rooted_blocks({.mesh = world, .unused_parameters = UnusedParameters::Zeros});
    for (int pass = 0; pass < 3; pass++) {
      std::optional<NoSync> guard;
      if (pass < 2) guard.emplace(no_sync(*model));
      loss_of_some(*model, world.rank(), 2, 10 * pass + world.rank()).backward();
      for (int rank = 0; rank < 2; rank++) (loss_of_some(whole, rank, 2, 10 * pass + rank) / 2).backward();
    }
    std::vector<at::Tensor> expected;
    for (const auto& parameter : whole.parameters()) expected.push_back(parameter.grad());
    expect_gradients(*model, expected);
  });
}

TEST(UnusedParameters, CountAsZeroInSyncGradients) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded_rooted_blocks({.mesh = world, .unused_parameters = UnusedParameters::Zeros});
    {
      const auto guard = no_sync(*model);
      loss_of_some(*model, world.rank(), 2, world.rank(), /*whole=*/false).backward();
    }
    sync_gradients(*model);
    RootedBlocks whole;
    for (int rank = 0; rank < 2; rank++) (loss_of_some(whole, rank, 2, rank, /*whole=*/false) / 2).backward();
    std::vector<at::Tensor> expected;
    for (const auto& parameter : whole.parameters()) expected.push_back(parameter.grad());
    expect_gradients(*model, expected);
  });
}

TEST(UnusedParameters, CountAsZeroWhereNoPassHasUsedThem) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded_rooted_blocks({.mesh = world, .unused_parameters = UnusedParameters::Zeros});
    const auto& block = *model->block[0];
    set_requires_grad(block, Training::Frozen);
    loss_of(*model, world.rank()).backward();
    set_requires_grad(block, Training::Trained);
    for (const auto& shard : parameters(block)) EXPECT_FALSE(shard.grad().defined());
    model->head(numbers({3, 8}, world.rank())).sum().backward();
    for (const auto& shard : parameters(block)) EXPECT_TRUE(at::equal(full_grad(shard), at::zeros_like(full_grad(shard))));
  });
}

TEST(UnusedParameters, MayBeTheReplicatedOnesOfAModule) {
  with_ranks(2, [](const Communicator& world) {
    RootedBlocks whole;
    const auto model = std::make_shared<RootedBlocks>();
    fully_shard(
        model,
        {.mesh = world, .replicated = {model->head->weight}, .reshard_after_forward = 2, .unused_parameters = UnusedParameters::Zeros});
    set_reshard_after_forward(*model, 2);
    for (int pass = 0; pass < 2; pass++) {
      const auto loss = [&](RootedBlocks& used, int rank) {
        const auto x = numbers({3, 8}, 10 * pass + rank);
        return rank == 0 ? torch::linear(x, used.head->weight).pow(2).mean() : used.forward(x).pow(2).mean();
      };
      loss(*model, world.rank()).backward();
      for (int rank = 0; rank < 2; rank++) (loss(whole, rank) / 2).backward();
    }
    for (const auto& [name, shard] : named_parameters(*model)) {
      const auto expected = whole.named_parameters()[name].grad();
      EXPECT_TRUE(at::allclose(full_grad(shard), expected, 1e-5, 1e-5)) << name;
    }
  });
}

TEST(ClipGradValue, LimitsEachValue) {
  with_ranks(3, [](const Communicator& world) {
    const auto model = sharded({.mesh = world});
    loss_of(*model, world.rank()).backward();
    clip_grad_value(parameters(*model), 0.01);
    const auto expected = expected_gradients(3, {0});
    for (size_t i = 0; i < expected.size(); i++) {
      EXPECT_TRUE(at::allclose(full_grad(parameters(*model)[i]), expected[i].clamp(-0.01, 0.01), 1e-6, 1e-6));
    }
    EXPECT_THAT([&] { clip_grad_value(parameters(*model), -1); }, ThrowsMessage<UsageError>(HasSubstr("-1 is no bound")));
  });
}

struct Sneaky : torch::nn::Module {
  torch::nn::Linear inner = register_module("inner", torch::nn::Linear(8, 8));
  std::function<void()> act = [] {};
  at::Tensor forward(const at::Tensor& x) {
    act();
    return inner(x);
  }
};

TEST(Phases, RefuseWhatHasNoMeaningInTheMiddleOfAPass) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = std::make_shared<Sneaky>();
    fill_with_numbers(*model);
    fully_shard(model, {.mesh = world});
    optim::SGD optimizer(parameters(*model), {.lr = 0.1});
    const std::vector<std::pair<std::string, std::function<void()>>> calls = {
        {"the norm of gradients", [&] { (void)clip_grad_norm(parameters(*model), 1); }},
        {"clip_grad_value", [&] { clip_grad_value(parameters(*model), 1); }},
        {"step()", [&] { optimizer.step(); }},
        {"no_sync", [&] { (void)no_sync(*model); }},
        {"set_gradient_divide_factors", [&] { set_gradient_divide_factors(*model, {.pre = 1, .post = 1}); }},
        {"full_params", [&] { (void)full_params(*model); }},
        {"sync_gradients", [&] { sync_gradients(*model); }},
        {"skip_step", [&] { skip_step(*model); }},
    };
    for (const auto& [name, what] : calls) {
      model->act = what;
      EXPECT_THAT([&] { call(model, numbers({3, 8})); },
                  ThrowsMessage<UsageError>(HasSubstr(name + " was called during the forward of 'Sneaky'")));
      model->act = [] {};
      auto out = call(model, numbers({3, 8}));
      out.register_hook([&](const at::Tensor&) { what(); });
      EXPECT_THAT([&] { out.sum().backward(); }, ThrowsMessage<UsageError>(HasSubstr(name + " was called during backward")));
    }
    call(model, numbers({3, 8}, world.rank())).sum().backward();
    optimizer.step();
  });
}

}  // namespace
}  // namespace tessera::testing::reduction_test
