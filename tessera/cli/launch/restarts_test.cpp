// `tessera launch` keeps logs of an attempt, blames a rank for its end, and starts the job again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "tests/testing/folder.h"
#include "tests/testing/launched.h"

namespace tessera::testing::restarts_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

/// A line of shell that records an error as torch does.
std::string record(const std::string& message) {
  return "printf '{\"message\": {\"message\": \"" + message + "\", \"extraInfo\": {}}}' >$TORCHELASTIC_ERROR_FILE; ";
}

TEST(ErrorFile, IsRepeatedInsteadOfLastWords) {
  const auto ended = run("2", shell("[ $RANK = 1 ] || exec sleep 100; " + record("no such file: a.bin") + "echo noise >&2; exit 3"));
  EXPECT_EQ(ended.status, 3);
  EXPECT_THAT(ended.err, EndsWith("launch: rank 1 ended with status 3 (stopped rank 0); its error:\n  no such file: a.bin\n"));
}

TEST(ErrorFile, IsWrittenByProgramsOfTessera) {
  const auto ended = run("1", {launch("", {}).front(), "ckpt", "inspect", "/no/such/checkpoint"});
  EXPECT_NE(ended.status, 0);
  EXPECT_THAT(ended.err, AllOf(HasSubstr("; its error:\n  "), HasSubstr("/no/such/checkpoint")));
}

TEST(ErrorFile, SaysWhoFailedFirst) {
  const auto ended = run("2", shell("[ $RANK = 1 ] && { " + record("out of luck") + "sleep 0.6; exit 5; }; sleep 0.3; " +
                                    record("rank 1 is silent") + "exit 4"));
  EXPECT_EQ(ended.status, 5);
  EXPECT_THAT(ended.err, HasSubstr("launch: rank 1 ended with status 5; its error:\n  out of luck\n"));
}

TEST(ErrorFile, OfARankThatWasSlowToEndCounts) {
  const auto ended = run("2", shell("[ $RANK = 1 ] && { trap '' TERM; " + record("out of luck") + "exec sleep 100; }; sleep 0.3; " +
                                    record("rank 1 is silent") + "exit 4"));
  EXPECT_EQ(ended.status, 1);
  EXPECT_THAT(ended.err, HasSubstr("rank 1"));
  EXPECT_THAT(ended.err, HasSubstr("its error:\n  out of luck\n"));
}

TEST(Logs, KeepWhatEachRankPrints) {
  const Folder folder;
  const auto logs = (folder / "logs").string();
  const auto ended =
      run("2", shell("echo \"out of $RANK\"; printf 'err of %s' $RANK >&2; [ $RANK = 0 ] || { " + record("bad") + "exit 3; }"), {},
          {"--log-dir", logs});
  EXPECT_EQ(ended.status, 3);
  EXPECT_THAT(ended.out, HasSubstr("[rank 0] out of 0\n"));
  EXPECT_THAT(ended.err, HasSubstr("launch: logs in " + logs));
  std::vector<std::filesystem::path> runs;
  for (const auto& entry : std::filesystem::directory_iterator(logs)) runs.push_back(entry);
  ASSERT_EQ(runs.size(), 1);
  const auto attempt = runs.front() / "attempt_0";
  EXPECT_EQ(read_file(attempt / "rank_0/stdout.log"), "out of 0\n");
  EXPECT_EQ(read_file(attempt / "rank_0/stderr.log"), "err of 0");
  EXPECT_EQ(read_file(attempt / "rank_1/stdout.log"), "out of 1\n");
  EXPECT_THAT(read_file(attempt / "rank_1/error.json"), HasSubstr("bad"));
  EXPECT_FALSE(std::filesystem::exists(attempt / "rank_0/error.json"));
}

TEST(Logs, ShowWhatTeeSays) {
  const Folder folder;
  const auto shown = [&](const std::string& tee) {
    const auto ended = run("1", shell("echo out; echo err >&2; exit 3"), {}, {"--log-dir", folder / "logs", "--tee", tee});
    EXPECT_THAT(ended.err, EndsWith("its last words:\n  err\n"));
    return std::pair(ended.out.find("out") != std::string::npos, ended.err.find("[rank 0] err") != std::string::npos);
  };
  EXPECT_EQ(shown("none"), std::pair(false, false));
  EXPECT_EQ(shown("out"), std::pair(true, false));
  EXPECT_EQ(shown("err"), std::pair(false, true));
  EXPECT_EQ(shown("both"), std::pair(true, true));
  EXPECT_THAT(run("1", {"true"}, {}, {"--tee", "none"}).err, HasSubstr("--log-dir"));
}

TEST(Logs, AreRefusedWhereTheyCanNotBe) {
  const auto ended = run("1", {"true"}, {}, {"--log-dir", "/proc/logs"});
  EXPECT_EQ(ended.status, 1);
  EXPECT_THAT(ended.err, AllOf(HasSubstr("can't create the folder /proc/logs"), Not(HasSubstr("logs in"))));
}

TEST(Restarts, BeginAgainUntilAllEndWell) {
  const auto script =
      shell("echo $RANK $TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_MAX_RESTARTS; [ $TORCHELASTIC_RESTART_COUNT = 2 ] || exit 3");
  const auto through = run("2", script, {}, {"--max-restarts", "2"});
  EXPECT_EQ(through.status, 0) << through.err;
  EXPECT_THAT(lines(through.out), ::testing::IsSupersetOf({"[rank 0] 0 2 2", "[rank 1] 1 2 2"}));
  EXPECT_THAT(through.err,
              AllOf(HasSubstr("ended with status 3"), HasSubstr("launch: attempt 2 of 3 begins"), HasSubstr("attempt 3 of 3")));
  const auto given_up = run("2", script, {}, {"--max-restarts", "1"});
  EXPECT_EQ(given_up.status, 3);
  EXPECT_THAT(given_up.err, Not(HasSubstr("attempt 3")));
}

TEST(Restarts, MeetAtAnotherPortInTheSameRun) {
  const auto ended = run("1", shell("echo $TORCHELASTIC_RUN_ID; echo $MASTER_PORT; exit 3"), {}, {"--max-restarts", "1"});
  const auto printed = lines(ended.out);
  ASSERT_EQ(printed.size(), 4);
  EXPECT_EQ(printed[0], printed[2]);
  EXPECT_NE(printed[1], printed[3]);
}

TEST(Restarts, GoOnWithoutRanksThatWereKilled) {
  const auto script =
      shell("if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then [ $RANK = 1 ] && kill -9 $$; exec sleep 100; fi; echo of $WORLD_SIZE");
  const auto ended = run("3", script, {}, {"--max-restarts", "1", "--min-ranks", "2"});
  EXPECT_EQ(ended.status, 0) << ended.err;
  EXPECT_THAT(lines(ended.out), UnorderedElementsAre("[rank 0] of 2", "[rank 1] of 2"));
  EXPECT_THAT(run("3", script, {}, {"--max-restarts", "1"}).out, HasSubstr("[rank 2] of 3"));
  const auto too_few = run("3", script, {}, {"--max-restarts", "1", "--min-ranks", "3"});
  EXPECT_EQ(too_few.status, 128 + SIGKILL);
  EXPECT_THAT(too_few.err, EndsWith("launch: 2 of at least 3 ranks are left, so this was the last attempt\n"));
}

TEST(Restarts, DoNotFollowASignal) {
  Launched job(launch("2", shell("trap 'exit 3' TERM; echo ready; while :; do sleep 0.1; done"), {"--max-restarts", "5"}));
  for (int i = 0; i < 2; i++) EXPECT_THAT(job.read_line(), HasSubstr("ready"));
  ::kill(job.pid(), SIGTERM);
  const auto ended = job.end();
  EXPECT_EQ(ended.status, 128 + SIGTERM);
  EXPECT_THAT(ended.err, Not(HasSubstr("begins")));
}

TEST(Places, AreDividedAmongRanks) {
  cpu_set_t usable;
  ASSERT_EQ(::sched_getaffinity(0, sizeof usable, &usable), 0);
  const auto ranks = std::min(CPU_COUNT(&usable), 4);
  const auto script = shell("grep Cpus_allowed: /proc/self/status | cut -f 2");
  const auto bound = lines(run(std::to_string(ranks), script, {}, {"--enable-cpu-affinity", "true"}).out);
  std::set<std::string> masks;
  for (const auto& line : bound) masks.insert(line.substr(line.find(']')));
  EXPECT_EQ(masks.size(), ranks) << ::testing::PrintToString(bound);
  const auto shared = lines(run(std::to_string(CPU_COUNT(&usable) + 1), script, {}, {"--enable-cpu-affinity", "true"}).out);
  EXPECT_EQ(shared.size(), CPU_COUNT(&usable) + 1);
}

TEST(Places, AreTheGpusOfTheConfiguration) {
  const auto script = shell("echo gpus $CUDA_VISIBLE_DEVICES");
  EXPECT_EQ(run("1", script, {}, {"--gpu-ids", "0,2"}).out, "[rank 0] gpus 0,2\n");
  EXPECT_EQ(run("1", script, {{"CUDA_VISIBLE_DEVICES", "3"}}).out, "[rank 0] gpus 3\n");
}

}  // namespace
}  // namespace tessera::testing::restarts_test
