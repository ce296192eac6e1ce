// Deadlocks among ranks that share memory are reported at once, and a slow rank is not taken for a stuck one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "tessera/base/error.h"
#include "tessera/comm/host/shared_area.h"
#include "tests/testing/transports.h"

namespace tessera::testing::deadlock_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr auto kLimit = std::chrono::seconds(20);  // far longer than a test takes that does not run into it

class Waits : public ::testing::TestWithParam<World> {
 protected:
  using Program = std::function<void(const Communicator& world, const SharedArea& area)>;
  static void run(const Program& program) {
    run_world(
        GetParam(),
        [&](const Communicator& world) {
          const auto attempt = world.share({.bytes_per_rank = 64, .counters = 2});
          ASSERT_TRUE(attempt.area) << attempt.why_not;
          program(world, *attempt.area);
        },
        kLimit);
  }
};

std::string words(int rank) {
  return "rank " + std::to_string(rank) + " reads";
}

TEST_P(Waits, ForEachOtherAreToldToAllAtOnce) {
  run([](const Communicator& world, const SharedArea& area) {
    // Each waits for the counter that the others would raise next.
    const int own = world.rank() % 2;
    const auto begin = std::chrono::steady_clock::now();
    const auto text = message_of<DeadlockError>([&] { area.wait(own, 1, kLimit, [&] { return words(world.rank()); }); });
    EXPECT_THAT(text, AllOf(HasSubstr("wait for each other"), HasSubstr(words(0)), HasSubstr(words(1))));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, kLimit / 2);
    EXPECT_THAT(message_of<CommError>([&] { area.expect_in_step(); }), HasSubstr("tessera::recover"));
    world.barrier();
    area.back_in_step();
    world.barrier();
    area.reach(0, 1);
    area.wait(0, 1, kLimit, [] { return "all that come on"; });
  });
}

TEST_P(Waits, ThatAllMayYieldDoSo) {
  run([](const Communicator& world, const SharedArea& area) {
    const int own = world.rank() % 2;
    EXPECT_FALSE(area.wait_or_yield(own, 1, kLimit, [&] { return words(world.rank()); }));
    EXPECT_NO_THROW(area.expect_in_step());
    area.reach(own, 1);
    area.reach(1 - own, 1);
    EXPECT_TRUE(area.wait_or_yield(own, 1, kLimit, [&] { return words(world.rank()); }));
  });
}

TEST_P(Waits, ThatMayYieldDoNotWhereOthersCant) {
  run([](const Communicator& world, const SharedArea& area) {
    const auto what = [&] { return words(world.rank()); };
    const auto wait = [&] { world.rank() == 0 ? area.wait(0, 1, kLimit, what) : void(area.wait_or_yield(1, 1, kLimit, what)); };
    EXPECT_THAT(message_of<DeadlockError>(wait), HasSubstr(words(world.rank())));
    world.barrier({.unit = "after"});  // the rank that gets the error first must not be gone before the others get it
  });
}

TEST_P(Waits, InACollectiveGoOnUntilTheOthersCome) {
  run([](const Communicator& world, const SharedArea& area) {
    if (world.rank() != 0) {
      const auto text = message_of<DeadlockError>([&] { area.wait(0, 1, kLimit, [&] { return words(world.rank()); }); });
      // Another rank that got the error before this one may be in the barrier by now.
      EXPECT_THAT(text, AllOf(HasSubstr("rank 0: barrier of 'here'"), HasSubstr(words(world.rank()))));
    }
    world.barrier({.unit = "here"});
  });
}

TEST_P(Waits, ForARankThatIsBusyAreNoDeadlock) {
  run([](const Communicator& world, const SharedArea& area) {
    for (uint32_t turn = 1; turn <= 3; turn++) {
      if (world.rank() == static_cast<int>(turn) % world.size()) std::this_thread::sleep_for(std::chrono::milliseconds(400));
      area.reach(0, turn);
      area.wait(0, turn, kLimit, [] { return "a slow rank"; });
    }
  });
}

TEST_P(Waits, OfTwoThreadsOfARankAreNoDeadlock) {
  run([](const Communicator& world, const SharedArea& area) {
    // While one thread of a rank waits, the other may be about to do what other ranks wait for.
    std::thread reader([&] { area.wait(0, 1, kLimit, [] { return "what the other thread does"; }); });
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    area.reach(0, 1);
    reader.join();
    world.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, Waits, ::testing::Values(World{"threads", 2}, World{"threads", 3}, World{"shm", 2}, World{"shm", 3}),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace tessera::testing::deadlock_test
