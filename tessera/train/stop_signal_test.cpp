#include "tessera/train/stop_signal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "tessera/base/error.h"
#include "tests/testing/transports.h"

namespace tessera::train::stop_signal_test {
namespace {

int own_signals = 0;

/// Counts a signal in a handler of the program's own, and restores the earlier handler.
class OwnHandler {
 public:
  explicit OwnHandler(int signal) : signal_(signal), before_(std::signal(signal, [](int) { own_signals++; })) { own_signals = 0; }
  OwnHandler(const OwnHandler&) = delete;
  ~OwnHandler() { std::signal(signal_, before_); }

 private:
  int signal_;
  void (*before_)(int);
};

TEST(StopSignal, IsTrueOnAllRanksOnceOneWasTold) {
  testing::run_world({"threads", 3}, [](const Communicator& world) {
    StopSignal stop(world);
    EXPECT_FALSE(stop.requested());
    if (world.rank() == 1) std::raise(SIGUSR1);
    EXPECT_TRUE(stop.requested());
    EXPECT_TRUE(stop.requested());
    world.barrier();
    StopSignal next(world);  // does not count signals that came before it was made
    EXPECT_FALSE(next.requested());
  });
}

TEST(StopSignal, TakesControlCUnlessToldOtherwise) {
  testing::run_world({"self", 1}, [](const Communicator& world) {
    const OwnHandler typed(SIGINT);
    StopSignal stop(world);
    std::raise(SIGINT);
    EXPECT_TRUE(stop.requested());
    EXPECT_EQ(own_signals, 0);
  });
}

TEST(StopSignal, LeavesTheSecondSignalToTheProgram) {
  testing::run_world({"self", 1}, [](const Communicator& world) {
    const OwnHandler term(SIGTERM), user(SIGUSR1);
    {
      StopSignal stop(world);
      std::raise(SIGUSR1);
      EXPECT_EQ(own_signals, 0);
      EXPECT_TRUE(stop.requested());
      std::raise(SIGUSR1);  // counts as the same signal, passed on by another process
      EXPECT_EQ(own_signals, 0);
      std::this_thread::sleep_for(std::chrono::milliseconds(1100));
      std::raise(SIGTERM);
      std::raise(SIGUSR1);
      EXPECT_EQ(own_signals, 2);
    }
    {
      const StopSignal unused(world);
    }
    std::raise(SIGTERM);
    EXPECT_EQ(own_signals, 3);
  });
}

TEST(StopSignal, TakesTheSignalsThatItIsGiven) {
  testing::run_world({"self", 1}, [](const Communicator& world) {
    const OwnHandler term(SIGTERM);
    StopSignal stop(world, {.signals = {SIGINT}});
    std::raise(SIGTERM);
    EXPECT_EQ(own_signals, 1);
    EXPECT_FALSE(stop.requested());
    std::raise(SIGINT);
    EXPECT_TRUE(stop.requested());
    EXPECT_THAT(testing::message_of<UsageError>([&] { StopSignal never(world, {.signals = {SIGKILL}}); }),
                ::testing::HasSubstr("no program can handle signal 9"));
  });
}

}  // namespace
}  // namespace tessera::train::stop_signal_test
