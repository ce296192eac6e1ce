// Ranks that are late, that throw, that leave: the others end in time, with an error that names them.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/testing/transports.h"

namespace tessera::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

class TalkingWorld : public ::testing::TestWithParam<World> {
 protected:
  int last() const { return GetParam().ranks - 1; }
  std::string last_rank() const { return "rank " + std::to_string(last()); }
};

TEST_P(TalkingWorld, NamesTheRankThatDoesNotCome) {
  std::atomic<int> waiting = last();
  run_world(GetParam(), [&](const Communicator& world) {
    world.all_reduce(at::ones({3}), {}, {.unit = "the first"}).wait();
    if (world.rank() == last()) {
      while (waiting > 0) std::this_thread::sleep_for(milliseconds(5));
      // Whoever comes too late is told that the others have given up.
      EXPECT_THAT(message_of<CommError>([&] { world.barrier(); }), HasSubstr("waited"));
      return;
    }
    const auto impatient = world.with_limit(milliseconds(300));
    const Piece piece{.whole = at::zeros({world.size()}), .own = at::zeros({1})};
    const auto message = message_of<CommError>([&] { impatient.all_gather(std::array{piece}, {.unit = "layers.3", .version = 7}).wait(); });
    waiting--;
    EXPECT_THAT(message, HasSubstr("all_gather of 'layers.3' version 7"));
    EXPECT_THAT(message, HasSubstr(last_rank()));
    EXPECT_THAT(message, HasSubstr("all_reduce of 'the first'"));
    // The group is done for, and says why.
    EXPECT_EQ(message_of<CommError>([&] { world.barrier(); }), message);
  });
}

TEST_P(TalkingWorld, CarriesAnExceptionToTheOthers) {
  const auto message = message_of<Error>([&] {
    run_world(GetParam(), [&](const Communicator& world) {
      world.barrier();
      if (world.rank() == last()) throw std::runtime_error("the disk is full");
      const auto heard = message_of<CommError>([&] { world.barrier(); });
      EXPECT_THAT(heard, HasSubstr("the disk is full"));
      throw CommError(heard);
    });
  });
  EXPECT_THAT(message, HasSubstr("the disk is full"));
  // Threads know for sure who was first.
  if (GetParam().transport == "threads") {
    EXPECT_EQ(message, last_rank() + ": the disk is full");
  }
}

TEST_P(TalkingWorld, NamesTheRankThatLeaves) {
  run_world(GetParam(), [&](const Communicator& world) {
    world.barrier();
    if (world.rank() == last()) return;
    const auto start = std::chrono::steady_clock::now();
    const auto message = message_of<CommError>([&] { world.barrier(); });
    EXPECT_THAT(message, HasSubstr(last_rank()));
    EXPECT_LT(std::chrono::steady_clock::now() - start, kTestLimit);
  });
}

TEST_P(TalkingWorld, EndsWhatIsUnderWayWhenAborted) {
  run_world(GetParam(), [&](const Communicator& world) {
    world.barrier();
    std::vector<Work> works;
    if (world.rank() != last()) {
      for (int i = 0; i < 3; i++) works.push_back(world.all_reduce(at::ones({5})));
      for (const auto& work : works) EXPECT_THAT(message_of<CommError>([&] { work.wait(); }), HasSubstr("enough of this"));
    } else {
      std::this_thread::sleep_for(milliseconds(50));
      world.abort("enough of this");
      EXPECT_THAT(message_of<CommError>([&] { world.barrier(); }), HasSubstr("enough of this"));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, TalkingWorld, ::testing::ValuesIn(talking_worlds()), ::testing::PrintToStringParamName());

TEST(Limits, MustBePositive) {
  run_world({.transport = "self"}, [](const Communicator& world) {
    EXPECT_THAT(message_of<UsageError>([&] { (void)world.with_limit(milliseconds(0)); }), HasSubstr("0 ms"));
    EXPECT_EQ(world.with_limit(seconds(2)).limit(), seconds(2));
    EXPECT_EQ(world.limit(), kTestLimit);
  });
}

TEST(Work, ThatIsDroppedStillKeepsItsBuffers) {
  run_world({.transport = "threads", .ranks = 3}, [](const Communicator& world) {
    for (int i = 0; i < 20; i++) {
      auto tensor = at::full({10'000}, 1.0F);
      const auto work = world.all_reduce(tensor);
      (void)work;
    }
    world.barrier();
  });
}

}  // namespace
}  // namespace tessera::testing
