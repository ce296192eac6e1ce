// Gradients of sharded models equal those of unsharded ones: accumulated, from graphs that are used twice, of second order, and of units
// that are frozen and thawed. Ranks that all have the same batches get a warning.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/reduction.h"
#include "tessera/shard/training.h"
#include "tests/testing/default_device.h"
#include "tests/testing/net.h"
#include "tests/testing/residences.h"

namespace tessera::testing::gradients_test {
namespace {

TEST(Gradients, AreThoseThatUsersOfShardsExpect) {
  with_ranks(3, [](const Communicator& world) {
    auto unsharded = seeded_net();
    auto net = sharded_net(world);
    const auto shards = parameters(*net);
    const auto originals = unsharded->parameters();
    const auto x = input(world.rank());
    const auto expect_same = [&](double factor) {
      for (size_t i = 0; i < shards.size(); i++) {
        EXPECT_TRUE(at::allclose(full_grad(shards[i]), originals[i].grad() * factor, 1e-5, 1e-5)) << i;
      }
    };
    mean_over_ranks(world, [&](int rank) { return unsharded(input(rank)).pow(2).sum(); }).backward();
    // Accumulation over several passes, two forwards before one backward, a graph used twice.
    net(x).pow(2).sum().backward();
    expect_same(1);
    net(x).pow(2).sum().backward();
    expect_same(2);
    net->zero_grad();
    (net(x).pow(2).sum() + net(x).pow(2).sum()).backward();
    expect_same(2);
    net->zero_grad();
    const auto loss = net(x).pow(2).sum();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    expect_same(2);
    net->zero_grad();

    const auto gradients = torch::autograd::grad({net(x).pow(2).sum()}, shards);
    ASSERT_EQ(gradients.size(), shards.size());
    EXPECT_EQ(gradients[0].sizes(), shards[0].sizes());
    EXPECT_FALSE(shards[0].grad().defined());

    int calls = 0;
    auto hooked = shards[0];
    hooked.register_hook([&calls](const at::Tensor& gradient) {
      calls++;
      return gradient * 2;
    });
    net(x).pow(2).sum().backward();
    EXPECT_EQ(calls, 1);
    EXPECT_TRUE(at::allclose(full_grad(shards[0]), originals[0].grad() * 2, 1e-5, 1e-5));
    EXPECT_TRUE(at::allclose(full_grad(shards[1]), originals[1].grad(), 1e-5, 1e-5));
  });
}

TEST(Gradients, OfInputsMayBeDifferentiatedAgain) {
  with_ranks(2, [](const Communicator& world) {
    const auto penalty = [](Net& net, int rank) {
      auto x = input(rank).set_requires_grad(true);
      const auto energy = net(x).pow(2).sum();
      const auto forces = torch::autograd::grad({energy}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
      return forces.pow(2).sum() + energy;
    };
    auto unsharded = seeded_net();
    mean_over_ranks(world, [&](int rank) { return penalty(unsharded, rank); }).backward();
    auto net = sharded_net(world);
    penalty(net, world.rank()).backward();
    const auto shards = parameters(*net);
    for (size_t i = 0; i < shards.size(); i++) {
      EXPECT_TRUE(at::allclose(full_grad(shards[i]), unsharded->parameters()[i].grad(), 1e-4, 1e-5)) << i;
    }
  });
}

TEST(Gradients, OfParametersMayNotBeDifferentiatedAgain) {
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net();
    fully_shard(net, {.mesh = world});
    const auto refused = ::testing::HasSubstr("unit 'Net': gradients of parameters that can be differentiated again (create_graph)");
    const auto backward = [&] { net(input()).pow(2).sum().backward({}, true, /*create_graph=*/true); };
    backward();
    const auto squares = net->parameters()[0].grad().pow(2);
    EXPECT_THAT(message_of<UsageError>([&] { squares.backward(at::ones_like(squares)); }), refused);
    // Gradients that are kept for a later reduction have no graph, so a later error would come too late.
    {
      const auto guard = no_sync(*net);
      EXPECT_THAT(message_of<UsageError>(backward), refused);
    }
    net->zero_grad();  // ends a cycle: a gradient with a graph holds its parameter, which holds the gradient
  });
}

TEST(FrozenUnits, GetNoGradientUntilTheyThaw) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world), unsharded = seeded_net();
    for (const auto training : {Training::Frozen, Training::Trained, Training::Frozen}) {
      net->zero_grad();
      unsharded->zero_grad();
      set_requires_grad(*net->b, training);
      set_requires_grad(*unsharded->b, training);
      net(input(world.rank())).pow(2).sum().backward();
      mean_over_ranks(world, [&](int rank) { return unsharded(input(rank)).pow(2).sum(); }).backward();
      for (size_t i = 0; i < 6; i++) {
        const auto expected = unsharded->parameters()[i].grad(), actual = full_grad(parameters(*net)[i]);
        ASSERT_EQ(actual.defined(), expected.defined()) << i;
        EXPECT_TRUE(!expected.defined() || at::allclose(actual, expected, 1e-5, 1e-5)) << i;
      }
    }
  });
}

/// Returns the lines that are logged in some passes, in which `batch` chooses the batch of each rank.
std::vector<std::string> said_about_batches(int passes, Residence residence, const std::function<int(int rank, int pass)>& batch) {
  std::vector<std::string> lines;
  auto before = set_log_sink([&](const LogRecord& record) { lines.emplace_back(record.text); });
  with_ranks(3, [&](const Communicator& world) {
    auto net = seeded_net();
    fully_shard(net->b, {.mesh = world, .residence = residence});
    fully_shard(net, {.mesh = world, .residence = residence});
    for (int pass = 0; pass < passes; pass++) net(input(batch(world.rank(), pass))).pow(2).sum().backward();
  });
  set_log_sink(std::move(before));
  return lines;
}

TEST(EqualBatches, BringAWarningOnce) {
  if (!on_cpu()) GTEST_SKIP() << "on a device it would make the host wait";
  for (const auto residence : residences()) {
    const auto said = said_about_batches(50, residence, [](int, int pass) { return pass; });
    ASSERT_EQ(said.size(), 1);
    EXPECT_THAT(said.front(), ::testing::HasSubstr("all 3 ranks have had the same gradients in 20 backward passes"));
    EXPECT_THAT(said_about_batches(15, residence, [](int, int pass) { return pass; }), ::testing::IsEmpty());
    EXPECT_THAT(said_about_batches(50, residence, [](int rank, int pass) { return rank + pass; }), ::testing::IsEmpty());
    EXPECT_THAT(said_about_batches(50, residence, [](int rank, int pass) { return pass == 10 ? rank : pass; }), ::testing::IsEmpty());
  }
}

}  // namespace
}  // namespace tessera::testing::gradients_test
