// What rank 0 sends is compared with what has arrived.
#include "tessera/shard/unit/start_values.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/testing/net.h"

namespace tessera::testing::start_values_test {
namespace {

using ::testing::HasSubstr;

TEST(StartValues, ThatArriveChangedAreAnErrorOnAllRanks) {
  with_ranks(3, [](const Communicator& world) {
    const ShardOptions options{.mesh = world, .start = Start::FromRank0};
    expect_arrived({.names = {"a", "b"}, .fingerprints = {1, 2}}, options, "unit");
    const Arrivals arrivals{.names = {"a", "b"}, .fingerprints = {1, world.rank() == 2 ? uint64_t{3} : uint64_t{2}}};
    const auto message = message_of<DisagreementError>([&] { expect_arrived(arrivals, options, "unit"); });
    EXPECT_THAT(message, HasSubstr("parameter 'b' that arrived are not those that rank 0 sent"));
    EXPECT_TRUE(world.rank() == 2 || message.find("rank 2") != std::string::npos) << message;
  });
}

}  // namespace
}  // namespace tessera::testing::start_values_test
