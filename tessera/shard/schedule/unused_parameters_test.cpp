// Ranks whose backward passes use different parameters: an error, or gradients of zero.
#include "tessera/shard/reduction.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/shard/report.h"
#include "tessera/shard/training.h"
#include "tessera/shard/unsharding.h"
#include "tests/testing/blocks.h"
#include "tests/testing/default_device.h"
#include "tests/testing/net.h"

namespace tessera::testing::unused_parameters_test {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

/// The last rank uses all parameters. The other ranks use only layer `a` of every second block. Without `whole`, they do not use the blocks
/// in between, and rank 0 does not use the head.
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

TEST(UnusedParameters, CountAsZeroIfAsked) {
  if (!on_cpu()) GTEST_SKIP() << "it needs memory that ranks share";
  for (const int ranks : {1, 2, 3}) {
    with_ranks(ranks, [&](const Communicator& world) {
      for (const auto residence : {Residence::Gathered, Residence::Auto}) {
        RootedBlocks whole;
        const auto model =
            sharded_rooted_blocks({.mesh = world, .residence = residence, .schedule = {.unused_parameters = UnusedParameters::Zeros}});
        for (int pass = 0; pass < 3; pass++) {
          // A gather needs all ranks, so that all have to use the same units of gathered memory.
          const bool same_units = residence == Residence::Gathered;
          loss_of_some(*model, world.rank(), ranks, 10 * pass + world.rank(), same_units).backward();
          for (int rank = 0; rank < ranks; rank++) (loss_of_some(whole, rank, ranks, 10 * pass + rank, same_units) / ranks).backward();
        }
        expect_same_gradients(*model, whole);
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
    const auto model = sharded_rooted_blocks({.mesh = world});
    EXPECT_THAT([&] { loss_of_some(*model, world.rank(), 2, 0).backward(); }, ThrowsMessage<CommError>(HasSubstr("block")));
  });
}

TEST(UnusedParameters, AreAnErrorBetweenReplicas) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded_rooted_blocks({.mesh = Mesh(world, {.replicate = 2, .shard = 1})});
    EXPECT_THAT([&] { loss_of_some(*model, world.rank(), 2, 0).backward(); }, ThrowsMessage<CommError>(HasSubstr("block")));
  });
}

// Each rank has a gradient for all that it trains, but not for the same parameters.
TEST(UnusedParameters, AreNotThoseThatAnotherRankHasFrozen) {
  for (const auto residence : {Residence::Gathered, Residence::Auto}) {
    with_ranks(2, [&](const Communicator& world) {
      const auto model = sharded_rooted_blocks({.mesh = world, .residence = residence});
      parameters(*model->block[0])[static_cast<size_t>(world.rank())].requires_grad_(false);
      EXPECT_THAT([&] { loss_of(*model, world.rank()).backward(); }, ThrowsMessage<CommError>(HasSubstr("block0")));
    });
  }
}

TEST(UnusedParameters, LeaveSwitchesAlone) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded_rooted_blocks({.mesh = world, .schedule = {.unused_parameters = UnusedParameters::Zeros}});
    set_requires_gradient_sync(*model->block[1], Required::No);
    loss_of(*model, world.rank()).backward();
    EXPECT_FALSE(model->block[1]->parameters()[0].grad().defined());
    EXPECT_TRUE(model->block[0]->parameters()[0].grad().defined());
    set_requires_gradient_sync(*model->block[1], Required::Yes);
    loss_of(*model, 10 + world.rank()).backward();
    expect_same_gradients(*model, whole_after(2, {0, 1}));
    EXPECT_THAT([&] { (void)torch::autograd::grad({loss_of(*model, 0)}, {parameters(*model)[0]}, {}, false, false, true); },
                ThrowsMessage<UsageError>(HasSubstr("they can't be asked for by autograd::grad")));
  });
}

TEST(UnusedParameters, MayBeMixedWithNoSync) {
  with_ranks(2, [](const Communicator& world) {
    RootedBlocks whole;
    const auto model = sharded_rooted_blocks({.mesh = world, .schedule = {.unused_parameters = UnusedParameters::Zeros}});
    for (int pass = 0; pass < 3; pass++) {
      std::optional<NoSync> guard;
      if (pass < 2) guard.emplace(no_sync(*model));
      loss_of_some(*model, world.rank(), 2, 10 * pass + world.rank()).backward();
      for (int rank = 0; rank < 2; rank++) (loss_of_some(whole, rank, 2, 10 * pass + rank) / 2).backward();
    }
    expect_same_gradients(*model, whole);
  });
}

TEST(UnusedParameters, CountAsZeroInSyncGradients) {
  if (!on_cpu()) GTEST_SKIP() << "it needs memory that ranks share";
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded_rooted_blocks({.mesh = world, .schedule = {.unused_parameters = UnusedParameters::Zeros}});
    {
      const auto guard = no_sync(*model);
      loss_of_some(*model, world.rank(), 2, world.rank(), /*whole=*/false).backward();
    }
    sync_gradients(*model);
    RootedBlocks whole;
    for (int rank = 0; rank < 2; rank++) (loss_of_some(whole, rank, 2, rank, /*whole=*/false) / 2).backward();
    expect_same_gradients(*model, whole);
  });
}

TEST(UnusedParameters, CountAsZeroWhereNoPassHasUsedThem) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded_rooted_blocks({.mesh = world, .schedule = {.unused_parameters = UnusedParameters::Zeros}});
    auto& block = *model->block[0];
    set_requires_grad(block, Training::Frozen);
    loss_of(*model, world.rank()).backward();
    set_requires_grad(block, Training::Trained);
    for (const auto& shard : parameters(block)) EXPECT_FALSE(shard.grad().defined());
    model->head(numbers({3, 8}, world.rank())).sum().backward();
    for (const auto& shard : parameters(block)) EXPECT_TRUE(at::equal(full_grad(shard), at::zeros_like(full_grad(shard))));
  });
}

TEST(UnusedParameters, CountAsZeroInSyncGradientsAlsoWhereNoRankHasUsedTheUnit) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded_rooted_blocks({.mesh = world, .schedule = {.unused_parameters = UnusedParameters::Zeros}});
    {
      const auto guard = no_sync(*model);
      model->head(numbers({3, 8}, world.rank())).sum().backward();
    }
    sync_gradients(*model);
    for (const auto& shard : parameters(*model->block[0])) EXPECT_TRUE(at::equal(full_grad(shard), at::zeros_like(full_grad(shard))));
  });
}

TEST(UnusedParameters, KeepUnitsUnsharded) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded_rooted_blocks({.mesh = world, .schedule = {.unused_parameters = UnusedParameters::Zeros}});
    EXPECT_THAT([&] { reshard(*model->block[0]); }, ThrowsMessage<UsageError>(HasSubstr("unit 'block0' stays unsharded from forward on")));
  });
}

TEST(UnusedParameters, MayBeTheReplicatedOnesOfAModule) {
  if (!on_cpu()) GTEST_SKIP() << "it needs memory that ranks share";
  with_ranks(2, [](const Communicator& world) {
    RootedBlocks whole;
    const auto model = std::make_shared<RootedBlocks>();
    fully_shard(model, {.mesh = world,
                        .replicated = {model->head->weight},
                        .reshard_after_forward = 2,
                        .schedule = {.unused_parameters = UnusedParameters::Zeros}});
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

}  // namespace
}  // namespace tessera::testing::unused_parameters_test
