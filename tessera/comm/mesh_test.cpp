#include "tessera/comm/mesh.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/comm/threads/run_ranks.h"
#include "tests/testing/transports.h"

namespace tessera::testing::mesh_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

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
    EXPECT_EQ(mesh.replicate().world_rank(0), world.rank());
    EXPECT_TRUE(Mesh::of_groups(world, {{0, 1, 2}}).shard().same_group(world));
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

/// The ranks of a group, found by communication.
std::vector<int64_t> members(const Communicator& group, const Communicator& world) {
  const auto seen = at::zeros({world.size()}, at::kLong);
  seen[world.rank()].fill_(1);
  group.all_reduce(seen).wait();
  const auto ranks = seen.nonzero().flatten();
  return {ranks.data_ptr<int64_t>(), ranks.data_ptr<int64_t>() + ranks.numel()};
}

TEST(Mesh, HasNamedAxesOfWhichTheLastVariesFastest) {
  for (const auto* transport : {"threads", "gloo"}) {
    run_world({.transport = transport, .ranks = 8}, [](const Communicator& world) {
      const Mesh mesh(world, {{"pp", 2}, {"replicate", -1}, {"shard", 2}});
      const int64_t rank = world.rank();
      EXPECT_EQ(mesh.axes()[1].size, 2);
      EXPECT_THAT(members(mesh.group("pp"), world), ElementsAre(rank % 4, rank % 4 + 4));
      EXPECT_THAT(members(mesh.group("replicate"), world), ElementsAre(rank & ~2, rank | 2));
      EXPECT_THAT(members(mesh.group("shard"), world), ElementsAre(rank & ~1, rank | 1));

      const auto stage = mesh.sub({"replicate", "shard"});
      const auto first = rank / 4 * 4;
      EXPECT_THAT(members(stage.world(), world), ElementsAre(first, first + 1, first + 2, first + 3));
      EXPECT_THAT(members(stage.shard(), world), ElementsAre(rank & ~1, rank | 1));
      EXPECT_THAT(members(stage.replicate(), world), ElementsAre(rank & ~2, rank | 2));
      EXPECT_EQ(stage.shape().replicate, 2);
      EXPECT_THAT(members(stage["replicate"].world(), world), ElementsAre(rank & ~2, rank | 2));

      const auto across = mesh.sub({"pp", "shard"});  // not neighbours
      EXPECT_THAT(members(across.world(), world), ElementsAre(rank & 2, (rank & 2) + 1, (rank & 2) + 4, (rank & 2) + 5));
      EXPECT_EQ(mesh.sub({"pp", "replicate", "shard"}).world().size(), 8);
    });
  }
}

// Equal meshes share their groups. Otherwise ranks would wait for each other in different groups, and each mesh would cost shared memory
// and a thread.
TEST(Mesh, IsTheSameIfItIsMadeAnew) {
  run_world({.transport = "threads", .ranks = 4}, [](const Communicator& world) {
    const Mesh mesh(world, {.replicate = 2, .shard = 2}), again(world.with_limit(std::chrono::seconds(1)), {{"a", 2}, {"b", 2}});
    EXPECT_TRUE(again.shard().same_group(mesh.shard()));
    EXPECT_TRUE(again.replicate().same_group(mesh.replicate()));
    EXPECT_EQ(again.shard().limit(), std::chrono::seconds(1));
    EXPECT_TRUE(Mesh::of_groups(world, {{2, 3}, {0, 1}}).shard().same_group(mesh.shard()));
    EXPECT_FALSE(Mesh::of_groups(world, {{0, 3}, {1, 2}}).shard().same_group(mesh.shard()));
    EXPECT_FALSE(Mesh(world.duplicate(), {.replicate = 2, .shard = 2}).shard().same_group(mesh.shard()));
    EXPECT_EQ(world.parts().size(), 3);
  });
}

TEST(Mesh, OfOneAxisIsAGroupThatShards) {
  run_world({.transport = "threads", .ranks = 4}, [](const Communicator& world) {
    const auto tensor = Mesh(world, {{"data", 2}, {"tensor", 2}})["tensor"];
    EXPECT_EQ(tensor.shape().shard, 2);
    EXPECT_EQ(tensor.replicate().size(), 1);
    EXPECT_TRUE(tensor.world().same_group(tensor.shard()));
    EXPECT_EQ(tensor.axes().front().name, "tensor");
  });
}

TEST(Mesh, MayBeOfGroupsThatAreListed) {
  run_world({.transport = "threads", .ranks = 5}, [](const Communicator& world) {
    const auto mesh = Mesh::of_groups(world, {{0, 3}, {1, 2, 4}});
    EXPECT_EQ(mesh.shard().size(), world.rank() % 3 == 0 ? 2 : 3);
    EXPECT_EQ(sum_of_ranks(mesh.shard(), world.rank()), world.rank() % 3 == 0 ? 3 : 7);
    const auto refused = [&](const std::vector<std::vector<int>>& groups) {
      return message_of<UsageError>([&] { Mesh::of_groups(world, groups); });
    };
    EXPECT_THAT(refused({{0, 3}, {1, 4}}), HasSubstr("[[0, 3], [1, 4]] lack rank 2; every rank from 0 to 4 is in exactly one"));
    EXPECT_THAT(refused({{0, 3}, {1, 2, 3, 4}}), HasSubstr("have rank 3 twice"));
    EXPECT_THAT(refused({{0, 3, 5}, {1, 2, 4}}), HasSubstr("name rank 5, which is not in a world of 5"));
    EXPECT_THAT(refused({{3, 0}, {1, 2, 4}}), HasSubstr("have [3, 0] out of order"));
    world.barrier();
  });
}

TEST(Mesh, ByHostShardsWithinHosts) {
  for (const auto& hosts : {std::vector<int>{0, 0, 1, 1, 2, 2}, {0, 1, 2, 2, 1, 0}}) {
    run_ranks(6,
              [&](const Communicator& world) {
                const auto mesh = Mesh::by_host(world);
                EXPECT_EQ(mesh.shape().replicate, 3);
                EXPECT_EQ(mesh.shard().size(), 2);
                EXPECT_EQ(mesh.shard().topology().hosts(), 1);
                EXPECT_EQ(mesh.replicate().topology().hosts(), 3);
                const auto host = mesh.sub({"shard"});
                EXPECT_EQ(members(host.world(), world), members(mesh.shard(), world));
              },
              {.host_of = hosts});
  }
  run_ranks(3,
            [](const Communicator& world) {
              const auto message = message_of<UsageError>([&] { Mesh::by_host(world); });
              EXPECT_THAT(message, AllOf(HasSubstr("host 0 has ranks 0 and 2, host 1 has rank 1"), HasSubstr("start as many on each")));
              world.barrier();
            },
            {.host_of = {0, 1, 0}});
}

TEST(Mesh, RefusesWhatDoesNotFit) {
  run_world({.transport = "threads", .ranks = 3}, [](const Communicator& world) {
    const auto refused = [&](std::vector<MeshAxis> axes) { return message_of<UsageError>([&] { Mesh(world, std::move(axes)); }); };
    EXPECT_THAT(refused({{"a", 65536}, {"b", 65536}}), HasSubstr("have to multiply to that"));
    EXPECT_THAT(message_of<UsageError>([&] { Mesh(world, {.replicate = 2, .shard = 2}); }),
                HasSubstr("replicate = 2 x shard = 2 does not fit a world of 3 ranks"));
    EXPECT_THAT(refused({{"replicate", 2}, {"shard", -1}}), HasSubstr("does not fit a world of 3 ranks"));
    EXPECT_THAT(refused({{"shard", 3}, {"shard", 1}}), HasSubstr("has 'shard' twice"));
    EXPECT_THAT(refused({{"replicate", -1}, {"shard", -1}}), HasSubstr("leaves two sizes open"));
    EXPECT_THAT(refused({{"replicate", 0}, {"shard", 3}}), HasSubstr("has no ranks along 'replicate'"));
    EXPECT_THAT(refused({{"shard", 3}, {"replicate", 1}}), HasSubstr("replicates over the first and shards over the second"));
    EXPECT_THAT(refused({{"", 3}}), HasSubstr("without a name"));
    EXPECT_THAT(refused({}), HasSubstr("(none) has no place for a rank"));

    const Mesh mesh(world, {{"pp", 3}, {"replicate", 1}, {"shard", 1}});
    EXPECT_THAT(message_of<UsageError>([&] { (void)mesh.group("tp"); }),
                HasSubstr("no axis 'tp'; it is pp = 3 x replicate = 1 x shard = 1"));
    EXPECT_THAT(message_of<UsageError>([&] { (void)mesh.sub({"shard", "pp"}); }), HasSubstr("in the order of the mesh"));
    EXPECT_THAT(message_of<UsageError>([&] { (void)mesh.sub({"pp", "pp"}); }), HasSubstr("once each"));
    EXPECT_THAT(message_of<UsageError>([&] { (void)mesh.sub({}); }), HasSubstr("at least one of its axes"));
    EXPECT_THAT(
        message_of<UsageError>([&] { (void)mesh.shard(); }),
        AllOf(HasSubstr("pp = 3 x replicate = 1 x shard = 1 has too many axes"), HasSubstr("mesh.sub({\"replicate\", \"shard\"})")));
    world.barrier();
  });
}

}  // namespace
}  // namespace tessera::testing::mesh_test
