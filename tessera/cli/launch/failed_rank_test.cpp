// A rank that fails because of another one may end before it. `tessera launch` learns from the failure record which rank that was.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <thread>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/process.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/comm/host/shared_area.h"
#include "tessera/comm/init.h"
#include "tests/testing/child_task.h"

namespace tessera::cli::failed_rank_test {
namespace {

using namespace std::chrono_literals;

/// Runs a rank of these tests: rank 2 fails, and the others notice it.
int rank_in(const std::string& trouble) {
  if (trouble == "never joins" && env("RANK") == "2") return 0;
  try {
    const auto world = init({.operation_limit = 10s});
    if (trouble == "ends well" && world.rank() == 2) return 0;
    const auto group = world.split(std::array{0, 1, 1});
    group.barrier();
    if (trouble == "fails a step of all" || trouble == "gets over a step of all") {
      try {
        all_or_none(world, {.unit = "test"}, "can't save", [&] {
          if (world.rank() == (trouble == "fails a step of all" ? 2 : 0)) throw CommError("no room");
        });
      } catch (const CommError&) {
        if (trouble == "fails a step of all" && world.rank() != 2) throw;
      }
    }
    const auto area = trouble == "leaves an area" ? world.share({.bytes_per_rank = 64, .counters = 1}).area : nullptr;
    if (world.rank() != 2) {
      if (area) area->wait(0, 1, 10s, [] { return std::string("reading"); });
      // In this group, rank 2 of the world is rank 1.
      (trouble == "leaves a group" && world.rank() == 1 ? group : world).barrier();
      return 0;
    }
    if (trouble == "aborts") world.abort("the disk is full");
  } catch (const CommError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 4;
  }
  std::this_thread::sleep_for(300ms);
  std::fprintf(stderr, "rank 2 is out of luck\n");
  return 5;
}

const testing::ChildTask in_trouble("a rank in trouble", rank_in);

class FailedRank : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {};

TEST_P(FailedRank, IsNamedBeforeThoseThatNoticeIt) {
  const auto& [transport, trouble] = GetParam();
  const auto tessera = std::filesystem::path(this_program()).parent_path().parent_path() / "bin/tessera";
  // Started by a shell, as programs often are.
  Process launcher({tessera, "launch", "--nproc-per-node", "3", "sh", "-c", "\"$0\" || exit $?", this_program()},
                   in_trouble.environment(trouble, {{"TESSERA_TRANSPORT", transport}}), Process::Output::Capture);
  const auto said = launcher.read_output();
  EXPECT_EQ(launcher.wait(20s), 5) << said;
  // A rank that is slow to end is stopped meanwhile.
  EXPECT_THAT(said, ::testing::HasSubstr("launch: rank 2 ended with status 5;"));
  EXPECT_THAT(said, ::testing::HasSubstr("; its last words:\n  rank 2 is out of luck\n"));
}

/// The exit status of `tessera launch` with three ranks, and its output.
std::pair<int, std::string> launched(const std::string& transport, const std::string& trouble) {
  const auto tessera = std::filesystem::path(this_program()).parent_path().parent_path() / "bin/tessera";
  Process launcher({tessera, "launch", "--nproc-per-node", "3", this_program()},
                   in_trouble.environment(trouble, {{"TESSERA_TRANSPORT", transport}}), Process::Output::Capture);
  const auto said = launcher.read_output();
  return {launcher.wait(20s).value_or(-1), said};
}

TEST(EarlyLeaver, IsNamedBeforeTheOthersStopWaiting) {
  const auto start = std::chrono::steady_clock::now();
  const auto [status, said] = launched("auto", "never joins");
  EXPECT_EQ(status, 1);
  EXPECT_THAT(said, ::testing::HasSubstr("launch: rank 2 ended with status 0 and said nothing on standard error, while rank"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, 30s);  // they would wait for minutes
}

TEST(EarlyLeaver, IsNamedByTheRankThatStillNeedsIt) {
  for (const auto* transport : {"shm", "gloo"}) {
    const auto [status, said] = launched(transport, "ends well");
    EXPECT_EQ(status, 4) << transport;
    EXPECT_THAT(said, ::testing::HasSubstr("rank 2, which it still needed, had ended with status 0")) << transport;
  }
}

INSTANTIATE_TEST_SUITE_P(OverShm, FailedRank,
                         ::testing::Combine(::testing::Values("shm"),
                                            ::testing::Values("leaves", "aborts", "leaves a group", "leaves an area", "fails a step of all",
                                                              "gets over a step of all")));
INSTANTIATE_TEST_SUITE_P(OverGloo, FailedRank, ::testing::Combine(::testing::Values("gloo"), ::testing::Values("leaves", "aborts")));

}  // namespace
}  // namespace tessera::cli::failed_rank_test
