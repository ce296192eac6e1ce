// The reader of the output of `tessera launch` dies, freezes or never comes, and the ranks run as without it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "tests/testing/folder.h"
#include "tests/testing/launched.h"

namespace tessera::testing::readers_test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

TEST(LaunchReaders, HearsTheLastWordsOfARankWhosePipeStaysOpen) {
  const auto start = std::chrono::steady_clock::now();
  const auto ended = run("1", shell("printf 'last words' >&2; setsid sleep 40 & exit 3"));
  EXPECT_EQ(ended.status, 3);
  EXPECT_THAT(ended.err, AllOf(HasSubstr("[rank 0] last words\n"), HasSubstr("; its last words:\n  last words\n")));
  EXPECT_LT(std::chrono::steady_clock::now() - start, 35s);
}

// As with `launch ... 2>&1 | tee log` and Ctrl-C, by which tee dies first.
TEST(LaunchReaders, GivesRanksTheirTimeWhenNobodyReadsItsOutput) {
  const Folder folder;
  Launched job(launch("2", shell("trap 'sleep 1; touch " + folder.path().string() +
                                 "/saved.$RANK; echo saved; exit 0' INT; "
                                 "echo ready; echo ready >&2; while :; do sleep 0.1; done")));
  for (int rank = 0; rank < 2; rank++) job.read_line();
  job.stop_reading();
  ::kill(job.pid(), SIGINT);
  EXPECT_EQ(job.end().status, 0);
  for (const auto* file : {"saved.0", "saved.1"}) EXPECT_TRUE(std::filesystem::exists(folder / file)) << file;
}

TEST(LaunchReaders, RunsWithoutItsStandardStreams) {
  const auto closed = [](const std::string& streams, const std::string& script) {
    auto command = launch("2", shell(script));
    command.insert(command.begin(), {"sh", "-c", "exec \"$@\" " + streams, "sh"});
    return Launched(command).end();
  };
  const auto without_err = closed("2>&-", "echo out; echo err >&2");
  EXPECT_EQ(without_err.status, 0);
  EXPECT_THAT(lines(without_err.out), UnorderedElementsAre("[rank 0] out", "[rank 1] out"));
  EXPECT_EQ(closed("<&- 2>&-", "exit 3").status, 3);
  const auto without_out = closed(">&-", "echo out");
  EXPECT_EQ(without_out.status, 1);
  EXPECT_THAT(without_out.err, HasSubstr("launch: standard output lost "));
  const auto full = closed(">/dev/full", "echo out");
  EXPECT_EQ(full.status, 1);
  EXPECT_THAT(full.err, HasSubstr("launch: standard output lost 26 bytes: No space left on device\n"));
  EXPECT_EQ(closed(">/dev/full", "echo out; exit 3").status, 3);
  EXPECT_EQ(closed("2>/dev/full", "echo err >&2").status, 0);
}

TEST(LaunchReaders, RunsWithoutReadersFromTheBeginning) {
  const Folder folder;
  Pipe nobody;
  nobody.read = Fd();
  Process job(launch("2", shell("echo out; echo err >&2; touch " + folder.path().string() + "/$RANK")), {}, {}, [&] {
    ::dup2(nobody.write.get(), STDOUT_FILENO);
    ::dup2(nobody.write.get(), STDERR_FILENO);
  });
  EXPECT_EQ(job.wait(20s), 0);
  for (const auto* file : {"0", "1"}) EXPECT_TRUE(std::filesystem::exists(folder / file)) << file;
}

// The rank that prints too much blocks on its pipe. The launcher still handles everything else.
TEST(LaunchReaders, ServesDeathsAndSignalsWhileNobodyReads) {
  const Folder folder;
  Launched dying(launch(
      "2", shell("[ $RANK = 0 ] && { yes | head -c 3000000; sleep 100; }; sleep 1; touch " + (folder / "ended").string() + "; exit 3")));
  EXPECT_TRUE(comes_true([&] { return std::filesystem::exists(folder / "ended"); }));
  std::this_thread::sleep_for(3s);  // no time limit is so long: rank 0 has been stopped by now
  const auto ended = dying.end();
  EXPECT_EQ(ended.status, 3);
  EXPECT_THAT(ended.err, HasSubstr("launch: rank 1 ended with status 3"));
  EXPECT_LT(ended.out.size(), 3'000'000);

  const auto file = [&](const std::string& name) { return (folder / name).string(); };
  Launched stopped(launch("2", shell("trap 'touch " + file("heard") + ".$RANK; exit 0' TERM; touch " + file("runs") + ".$RANK; " +
                                     "yes | head -c 3000000; while :; do sleep 0.1; done")));
  const auto both = [&](const std::string& name) {
    return std::filesystem::exists(file(name + ".0")) && std::filesystem::exists(file(name + ".1"));
  };
  EXPECT_TRUE(comes_true([&] { return both("runs"); }));
  std::this_thread::sleep_for(300ms);
  ::kill(stopped.pid(), SIGTERM);
  EXPECT_TRUE(comes_true([&] { return both("heard"); }));  // and still nobody reads
  EXPECT_EQ(stopped.end().status, 0);
}

TEST(LaunchReaders, GivesRanksTheirTimeWhenTheTerminalCloses) {
  const Folder folder;
  OnTerminal job(launch("2", shell("trap 'sleep 1; touch " + folder.path().string() + "/saved.$RANK; exit 0' HUP; echo \"ready $RANK\"; " +
                                   "while :; do sleep 0.1; done")));
  job.wait_for({"ready 0", "ready 1"});
  job.keyboard = Fd();
  EXPECT_EQ(job.process.wait(20s), 0);
  for (const auto* file : {"saved.0", "saved.1"}) EXPECT_TRUE(std::filesystem::exists(folder / file)) << file;
}

TEST(LaunchReaders, GoesOnWhenTheReaderOfAFifoLeaves) {
  const Folder folder;
  const auto fifo = (folder / "fifo").string();
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  auto command =
      launch("2", shell("echo first; sleep 0.5; echo second; sleep 0.5; echo third; touch " + folder.path().string() + "/$RANK"));
  command.insert(command.begin(), {"sh", "-c", "head -n 1 <'" + fifo + "' >/dev/null & exec \"$@\" >'" + fifo + "'", "sh"});
  EXPECT_EQ(Launched(command).end().status, 0);
  for (const auto* file : {"0", "1"}) EXPECT_TRUE(std::filesystem::exists(folder / file)) << file;
}

}  // namespace
}  // namespace tessera::testing::readers_test
