// Prefetching: the next unit of the learned order is unsharded early, and a wrong prediction changes no result.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/shard/report.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"
#include "tests/testing/net.h"

namespace tessera::testing::prefetch_test {
namespace {

TEST(Prefetch, UnshardsTheNextUnitOfTheLearnedOrder) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    fully_shard(net, {.mesh = world});
    const torch::NoGradGuard no_grad;
    for (int pass = 0; pass < 2; pass++) net(input());
    const auto gathers = [&](size_t unit) { return units(*net)[unit]->counters().gathers; };
    net->a(input());
    EXPECT_EQ(gathers(1), 3);  // the next unit of the learned order is prefetched
    net->b(at::ones({1, 10}));
    EXPECT_EQ(gathers(1), 3);
    EXPECT_EQ(gathers(2), 3);
    net->a(input());  // not the predicted use: a miss, but the result is right
    EXPECT_EQ(counters(*net).misses, 1);
    EXPECT_TRUE(at::equal(net(input()), seeded_net()->forward(input())));
  });
}

TEST(Prefetch, MayBeInProgressWhenTheModelAndItsWorldAreDestroyed) {
  run_world({.transport = "threads", .ranks = 2}, [](Communicator world) {
    auto net = sharded_net(world);
    fully_shard(net, {.mesh = world});
    const torch::NoGradGuard no_grad;
    for (int pass = 0; pass < 2; pass++) net(input());
    net->a(input());
  });
}

}  // namespace
}  // namespace tessera::testing::prefetch_test
