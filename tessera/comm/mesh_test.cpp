#include "tessera/comm/mesh.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/testing/transports.h"

namespace tessera::testing::mesh_test {
namespace {

float sum_of_ranks(const Communicator& group, int world_rank) {
  const auto sum = at::full({1}, static_cast<float>(world_rank));
  group.all_reduce(sum).wait();
  return sum.item<float>();
}

TEST(Mesh, OfOneRowShardsOverAllRanks) {
  run_world({.transport = "threads", .ranks = 3}, [](const Communicator& world) {
    const Mesh mesh = world;
    EXPECT_EQ(mesh.shape().shard, 3);
    EXPECT_EQ(mesh.shard().size(), 3);
    EXPECT_EQ(mesh.replicate().size(), 1);
    EXPECT_EQ(sum_of_ranks(mesh.shard(), world.rank()), 3);
    EXPECT_EQ(sum_of_ranks(mesh.replicate(), world.rank()), world.rank());
  });
}

TEST(Mesh, OfTwoRowsShardsAmongNeighbours) {
  for (const auto* transport : {"threads", "gloo"}) {
    run_world({.transport = transport, .ranks = 4}, [](const Communicator& world) {
      const Mesh mesh(world, {.replicate = 2, .shard = 2});
      EXPECT_EQ(sum_of_ranks(mesh.shard(), world.rank()), world.rank() < 2 ? 1 : 5);
      EXPECT_EQ(sum_of_ranks(mesh.replicate(), world.rank()), world.rank() % 2 == 0 ? 2 : 4);
      EXPECT_EQ(mesh.shard().rank(), world.rank() % 2);
    });
  }
}

TEST(Mesh, RefusesAShapeThatDoesNotFit) {
  run_world({.transport = "threads", .ranks = 3}, [](const Communicator& world) {
    const auto message = message_of<UsageError>([&] { Mesh(world, {.replicate = 2, .shard = 2}); });
    EXPECT_THAT(message, ::testing::HasSubstr("2 x 2 (replicate x shard) does not fit a world of 3 ranks"));
    world.barrier();
  });
}

}  // namespace
}  // namespace tessera::testing::mesh_test
