// fully_shard without a mesh.
#include "tessera/shard/fully_shard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/comm/init.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"
#include "tessera/shard/wrap.h"
#include "tests/testing/net.h"
#include "tests/testing/transports.h"

namespace tessera::testing::fully_shard_test {
namespace {

TEST(FullyShard, TakesTheWorldOfInit) {
  auto net = seeded_net();
  EXPECT_THAT(message_of<UsageError>([&] { fully_shard(net); }),
              ::testing::AllOf(::testing::HasSubstr("no mesh was given"), ::testing::HasSubstr("tessera::init")));
  EXPECT_TRUE(units(*net).empty());
  const auto world = init();
  fully_shard(net->a);
  fully_shard(net, {.residence = Residence::Gathered});
  auto other = seeded_net();
  fully_shard(other, {}, wrap_classes({"Linear"}));
  for (const auto* model : {&net, &other}) {
    EXPECT_FALSE(units(**model).empty());
    for (const auto& unit : units(**model)) EXPECT_TRUE(unit->mesh().world().same_group(world));
  }
}

TEST(FullyShard, TakesTheMeshOfTheModelForOptionsOfAPolicy) {
  with_ranks(2, [](const Communicator& world) {
    const Mesh mesh(world, {.replicate = 2, .shard = 1});
    auto net = seeded_net();
    auto policy = wrap_classes({"Linear"});
    policy.options = [](const ModuleInfo&) { return ShardOptions{.residence = Residence::Gathered}; };
    fully_shard(net, {.mesh = mesh}, policy);
    EXPECT_FALSE(units(*net).empty());
    for (const auto& unit : units(*net)) EXPECT_TRUE(unit->mesh().shard().same_group(mesh.shard()));
  });
}

}  // namespace
}  // namespace tessera::testing::fully_shard_test
