// If a rank is late, throws or leaves, the others end in time with an error that names it.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "tessera/base/compat.h"
#include "tessera/base/error.h"
#include "tessera/comm/calling.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/comm/groups/same_on_all.h"
#include "tessera/comm/host/shared_area.h"
#include "tests/testing/transports.h"

namespace tessera::testing::failure_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
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
      // A rank that comes too late is told that the others have given up.
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
    // The group can't be used any more, and its errors say why.
    EXPECT_EQ(message_of<CommError>([&] { world.barrier(); }), message);
  });
}

// Over messages, ranks with a longer limit wait for a rank that gives up first and closes its connections; they must not blame it.
TEST(Ranks, WithLongerLimitsAlsoBlameTheOneThatIsMissing) {
  std::atomic<int> waiting = 4;
  run_world({.transport = "gloo", .ranks = 5}, [&](const Communicator& world) {
    world.barrier();
    if (world.rank() == 4) {
      while (waiting > 0) std::this_thread::sleep_for(milliseconds(5));
      return;
    }
    const auto own = world.with_limit(world.rank() == 1 ? milliseconds(300) : milliseconds(4500));
    const auto message = message_of<CommError>([&] { own.barrier(); });
    waiting--;
    EXPECT_THAT(message, HasSubstr("waited 0.3 s for rank 4 and gave up"));
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
  // Ranks that are threads know for sure which of them failed first.
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

TEST_P(TalkingWorld, NamesTheCallThatOnlyOneRankMakes) {
  run_world(GetParam(), [&](const Communicator& world) {
    const Subject unit{.unit = "Net", .number = 5};
    const auto disagreement = [&](const std::function<void()>& of_last, const std::function<void()>& of_others) {
      return message_of<DisagreementError>([&] { world.rank() == last() ? of_last() : of_others(); });
    };
    const auto use = [&] { world.extremes(1, unit); };
    const auto call = [&] {
      const Calling calling("tessera::full_parameter");
      const Calling inner("something in it");
      use();
    };
    EXPECT_THAT(disagreement(call, [&] { world.barrier(); }),
                AllOf(HasSubstr("compare of 'Net' (unit 5), in tessera::full_parameter;"),
                      HasSubstr(last_rank() + " called tessera::full_parameter; every rank must make such a call")));
    EXPECT_THAT(disagreement(use, [&] { world.barrier(); }),
                HasSubstr(last_rank() + " uses parameters of the model; every rank must run each forward pass, also in an evaluation, "
                                        "and make the first read of a member"));
    EXPECT_THAT(disagreement(use, [&] { world.extremes(1, {.unit = "Net", .number = 6}); }), HasSubstr("UnusedParameters::Zeros"));
    world.barrier();
    if (world.rank() == last()) return;
    EXPECT_THAT(message_of<CommError>(call), HasSubstr("; every rank must call tessera::full_parameter, not only some of them"));
  });
  run_world(GetParam(), [&](const Communicator& world) {
    world.barrier();
    if (world.rank() == last()) return;
    EXPECT_THAT(message_of<CommError>([&] { world.extremes(1, {.unit = "Net", .number = 5}); }), HasSubstr("(data::Tail)"));
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
      EXPECT_THAT(message_of<CommError>([&] { world.barrier(); }), HasSubstr(last_rank() + ": enough of this"));
    }
  });
}

TEST_P(TalkingWorld, CarriesAnExceptionIntoTheGroupsThatWereSplitOff) {
  if (GetParam().ranks < 3) return;
  const auto message = message_of<Error>([&] {
    run_world(GetParam(), [&](const Communicator& world) {
      // All but rank 0 form a group, and wait in it for the last.
      std::vector<int> colors(static_cast<size_t>(world.size()), 1);
      colors[0] = 0;
      const auto group = world.split(colors);
      group.barrier();
      if (world.rank() == last()) throw UsageError("the disk is full");
      if (world.rank() == 0) return;
      EXPECT_THAT(message_of<CommError>([&] { group.barrier(); }), ::testing::AnyOf(HasSubstr("the disk is full"), HasSubstr("left")));
    });
  });
  EXPECT_THAT(message, HasSubstr("the disk is full"));
}

TEST_P(TalkingWorld, NamesTheWorldRankThatAbortsAGroup) {
  if (GetParam().ranks < 3) return;
  run_world(GetParam(), [&](const Communicator& world) {
    std::vector<int> colors(static_cast<size_t>(world.size()), 1);
    colors[0] = 0;
    const auto group = world.split(colors);
    if (world.rank() == last()) {
      group.abort("enough of this");
    } else {
      EXPECT_THAT(message_of<CommError>([&] { world.barrier(); }), HasSubstr(last_rank() + ": enough of this"));
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

TEST(Work, MayBeDoneOnTensorsOfInferenceMode) {
  run_world({.transport = "threads", .ranks = 2}, [](const Communicator& world) {
    const c10::InferenceMode mode;
    const auto tensor = at::ones({4});
    world.all_reduce(tensor).wait();
    EXPECT_EQ(tensor[3].item<float>(), 2);
  });
}

TEST(Ranks, RefuseALimitThatLeavesNoTime) {
  EXPECT_THAT(message_of<UsageError>([] {
                run_world(
                    {.transport = "threads", .ranks = 2}, [](const Communicator&) {}, milliseconds(0));
              }),
              HasSubstr("0 ms"));
}

TEST(Refusals, ReachAllRanksWhateverIsWrong) {
  run_world({.transport = "threads", .ranks = 2}, [](const Communicator& world) {
    // A tensor without memory: a storage whose guard throws.
    auto tensor = at::ones({4});
    if (world.rank() == 1) compat::guard_storage(*tensor.storage().unsafeGetStorageImpl(), "unit 'layers.0' is elsewhere");
    EXPECT_THAT(message_of<UsageError>([&] { world.all_reduce(tensor).wait(); }), HasSubstr("rank 1 can't take part"));
    const Piece piece{.whole = at::ones({4}), .own = at::ones({2}, world.rank() == 1 ? at::kLong : at::kFloat)};
    EXPECT_THAT(message_of<UsageError>([&] { world.reduce_scatter(std::array{piece}).wait(); }), HasSubstr("own is Long"));
    // A dtype that libtorch can't promote.
    const auto odd = world.rank() == 1 ? at::kFloat8_e4m3fn : at::kBFloat16;
    const Reduction sent_wider{.wire_dtype = at::kFloat};
    EXPECT_THAT(message_of<UsageError>([&] { world.all_reduce(at::empty({4}, odd), sent_wider).wait(); }),
                HasSubstr("rank 1 can't take part"));
    const Piece odd_piece{.whole = at::empty({4}, odd), .own = at::empty({2}, odd)};
    EXPECT_THAT(message_of<UsageError>([&] { world.reduce_scatter(std::array{odd_piece}, sent_wider).wait(); }),
                HasSubstr("rank 1 can't take part"));
    // A unit without parameters has no pieces, which is not an error.
    world.all_gather({}).wait();
    world.reduce_scatter({}, {.op = Reduce::Mean, .wire_dtype = at::kBFloat16}).wait();
  });
}

// Rank 3 of the world is rank 1 of its column, and rank 0 of a group that was split from that.
TEST(Groups, NameRanksByTheirNumbersInTheWorld) {
  for (const std::string transport : {"threads", "gloo"}) {
    run_world({.transport = transport, .ranks = 4}, [&](const Communicator& world) {
      const auto column = world.split(std::array{0, 1, 0, 1});
      EXPECT_EQ(column.world_rank(1), world.rank() % 2 == 0 ? 2 : 3);
      EXPECT_EQ(column.split(std::array{0, 1}).world_rank(0), world.rank());
      if (world.rank() % 2 == 0) return world.barrier();  // the failures are in the other column
      const bool is_last = world.rank() == 3;
      const auto piece = at::ones({2});
      EXPECT_THAT(message_of<DisagreementError>([&] { column.broadcast(piece, is_last ? 0 : 1).wait(); }),
                  AllOf(HasSubstr("rank 1 at operation 1: broadcast: 2 x Float from rank 3"), HasSubstr("rank 3 at operation 1")));
      EXPECT_THAT(message_of<UsageError>([&] { column.broadcast(piece, is_last ? 7 : 0).wait(); }), HasSubstr("rank 3 can't take part"));
      EXPECT_EQ(difference_on_ranks(column, is_last ? "a\tof 2\n" : "a\tof 1\n", {}), "rank 1: a of 1; rank 3: a of 2");
      const auto refuse = [&] {
        if (is_last) throw UsageError("too late");
      };
      EXPECT_THAT(message_of<UsageError>([&] { all_or_none(column, {}, "can't begin", refuse); }),
                  is_last ? HasSubstr("too late") : HasSubstr("rank 3 can't begin: too late"));
      if (transport == "threads") {
        const auto area = column.share({.bytes_per_rank = 64, .counters = 2}).area;
        const auto wait = [&] { area->wait(is_last ? 1 : 0, 1, kTestLimit, [] { return std::string("reads"); }); };
        EXPECT_THAT(message_of<DeadlockError>(wait), HasSubstr("each other: rank 1: reads; rank 3: reads."));
        column.barrier();
        area->back_in_step();
        column.barrier();
      }
      world.barrier();
    });
  }
  // A failure in one column reaches the other through the world. (Gloo closes the connections of a rank before the rank can say why.)
  for (const std::string transport : {"threads", "shm"}) {
    run_world({.transport = transport, .ranks = 4}, [&](const Communicator& world) {
      const auto column = world.split(std::array{0, 1, 0, 1});
      if (world.rank() == 1) {
        EXPECT_THAT(message_of<TimeoutError>([&] { column.with_limit(milliseconds(300)).barrier(); }),
                    AllOf(HasSubstr("of rank 1, barrier"), HasSubstr("waited 0.3 s for rank 3")));
      } else {
        EXPECT_THAT(message_of<CommError>([&] { world.barrier(); }),
                    HasSubstr("broken off: operation 0 of rank 1, barrier, waited 0.3 s for rank 3"));
      }
    });
  }
}

/// The resources of the system that this process holds: threads, file descriptors, shared memory.
std::array<size_t, 3> holdings() {
  const auto count = [](const char* folder) {
    return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator()));
  };
  std::ifstream maps("/proc/self/maps");
  size_t shared = 0;
  for (std::string line; std::getline(maps, line);) shared += line.find("memfd:tessera") != std::string::npos ? 1 : 0;
  return {count("/proc/self/task"), count("/proc/self/fd"), shared};
}

TEST(Groups, LeaveNothingBehind) {
  const auto use_and_break = [] {
    for (const auto* transport : {"threads", "shm", "gloo"}) {
      const auto program = [](const Communicator& world) {
        world.split(std::array{0, 1, 0}).barrier();
        if (world.rank() == 2) throw Error("over");
        world.barrier();
      };
      EXPECT_THROW(run_world({.transport = transport, .ranks = 3}, program), Error);
    }
  };
  use_and_break();  // the first time, libraries allocate memory that they keep
  const auto before = holdings();
  for (int i = 0; i < 3; i++) use_and_break();
  // Connections close in a thread of gloo's, so the end may come a moment later.
  for (int i = 0; i < 100 && holdings() > before; i++) std::this_thread::sleep_for(milliseconds(20));
  EXPECT_LE(holdings(), before);
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
}  // namespace tessera::testing::failure_test
