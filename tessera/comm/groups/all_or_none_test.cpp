#include "tessera/comm/groups/all_or_none.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "tessera/base/error.h"
#include "tessera/base/launch_record.h"
#include "tessera/comm/groups/same_on_all.h"
#include "tests/testing/transports.h"

namespace tessera::testing::all_or_none_test {
namespace {

using ::testing::StartsWith;

TEST(AllOrNone, KeepsTheFirstTrouble) {
  AllOrNone step;
  step.attempt([] {});
  EXPECT_FALSE(step.failed());
  EXPECT_EQ(step.trouble(), "");
  step.attempt([] { throw UsageError("no room"); });
  step.attempt([] { throw IoError("no light"); });
  EXPECT_TRUE(step.failed());
  EXPECT_EQ(step.trouble(), "no room");
}

TEST(AllOrNone, NamesTheFirstRankInTrouble) {
  EXPECT_FALSE(AllOrNone::first(std::array<std::string, 2>{}));
  const auto found = AllOrNone::first(std::array<std::string, 3>{"", "no room", "no light"});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->rank, 1);
  EXPECT_EQ(found->words, "no room");
}

TEST(AllOrNone, TellsAllRanksOfTheFailureOfOne) {
  run_world({.transport = "threads", .ranks = 3}, [](const Communicator& world) {
    AllOrNone fine;
    fine.attempt([] {});
    EXPECT_NO_THROW(fine.expect_all(world, {.unit = "test"}, "can't begin"));
    const auto refuse = [&](const std::string& words) {
      AllOrNone step;
      step.attempt([&] {
        if (world.rank() == 1) throw UsageError(words);
      });
      step.expect_all(world, {.unit = "test"}, "can't go on");
    };
    for (const auto& words : {std::string("it is too late"), std::string(1000, 'x'), std::string()}) {
      if (world.rank() == 1) {
        EXPECT_EQ(message_of<UsageError>([&] { refuse(words); }), words);
      } else {
        EXPECT_THAT(message_of<UsageError>([&] { refuse(words); }), StartsWith("rank 1 can't go on: " + words.substr(0, 200)));
      }
    }
    world.barrier();  // all may continue
  });
}

TEST(AllOrNone, TellsTheLauncherOfTheRankThatFailedUntilAllGoOn) {
  const LaunchRecord record;
  ::setenv(LaunchRecord::kVariable, record.path().c_str(), 1);
  ::setenv("RANK", "0", 1);  // the others are threads, which no launcher knows
  run_world({.transport = "threads", .ranks = 3}, [&](const Communicator& world) {
    const auto refuse = [&] {
      if (world.rank() == 2) throw IoError("no room");
    };
    EXPECT_THROW(all_or_none(world, {.unit = "test"}, "can't save", refuse), IoError);
    if (world.rank() == 0) {
      EXPECT_EQ(record.read()[0].culprit, 2);
    }
    world.barrier();
    EXPECT_EQ(record.read().count(1), 0);
    if (world.rank() == 0) {
      EXPECT_EQ(record.read()[0].culprit, std::nullopt);
    }
    EXPECT_THROW(all_or_none(world, {.unit = "test"}, "can't save", refuse), IoError);
    if (world.rank() == 0) {
      EXPECT_EQ(record.read()[0].culprit, 2);
    }
  });
  ::unsetenv("RANK");
  ::unsetenv(LaunchRecord::kVariable);
}

TEST(SameOnAll, FindsTheRankThatDiffers) {
  run_world({.transport = "threads", .ranks = 3}, [](const Communicator& world) {
    constexpr uint64_t kHalf = uint64_t{1} << 63;
    for (const uint64_t number : {uint64_t{0}, uint64_t{7}, kHalf - 1, kHalf, ~uint64_t{0}}) {
      EXPECT_TRUE(same_on_all(world, number, {.unit = "test"})) << number;
      for (const uint64_t other : {number + 1, number ^ kHalf, ~number}) {
        EXPECT_FALSE(same_on_all(world, world.rank() == 2 ? other : number, {.unit = "test"})) << number << " and " << other;
      }
    }
  });
}

}  // namespace
}  // namespace tessera::testing::all_or_none_test
