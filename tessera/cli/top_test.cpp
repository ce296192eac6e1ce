// The picture of a recorded run, from files as a run writes them.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/ioctl.h>
#include <termios.h>

#include "tessera/base/error.h"
#include "tessera/cli/top_frame.h"
#include "tests/testing/folder.h"
#include "tests/testing/launched.h"
#include "tests/testing/transports.h"

namespace tessera::cli::reports::top_test {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using namespace tessera::testing;

constexpr double kStarted = 1'764'500'000;

struct OfRank {
  double age = 0.5;
  int64_t step = 100;
  double compute = 0.5, waits = 0.4;
};

/// Writes two lines of a rank, and the beginning of a third one.
void write_rank(const Folder& folder, int rank, const OfRank& of) {
  std::string text;
  for (const double before : {1.0, 0.0}) {
    text += fmt::format(R"({{"time":{},"step":{},"steps":2,"seconds":1.0,"compute":{},"unshard":{},"reduce":0.0,"optimizer":0.05,"other":0.01,)"
                        R"("host":"a","memory":{{"process":3100000000,"shards":5}},"gathers":3,"place":"backward of layers.3"}})"
                        "\n",
                        kStarted + 60 - of.age - before, of.step - static_cast<int64_t>(2 * before), of.compute, of.waits);
  }
  write_file(folder / fmt::format("rank-{}.jsonl", rank), text + R"({"time":17)");
}

void write_run(const Folder& folder, int world, const std::string& status = "runs") {
  write_file(folder / "run.json", fmt::format(R"({{"format":1,"program":"llama","command":["llama"],"world":{},"hosts":["a"],"engine":"shm",)"
                                              R"("started":{},"ended":null,"status":"{}","flops_per_step":null,"peak_flops":null,"units":[]}})",
                                              world, kStarted, status));
  for (int rank = 0; rank < world; rank++) write_rank(folder, rank, {});
}

std::string frame(const Folder& folder, TopView view = {}) {
  return top_frame(read_run(folder.path(), Extent::Ends), kStarted + 60, view);
}

TEST(Top, ShowsCurveAndRanks) {
  const Folder folder;
  write_run(folder, 4);
  write_rank(folder, 2, {.compute = 0.9, .waits = 0.02});
  write_rank(folder, 3, {.age = 41, .step = 18});
  std::string metrics;
  for (int step = 1; step <= 8; step++)
    metrics += fmt::format("{{\"step\":{},\"loss\":{},\"lr\":0.01,\"memory\":3e9,\"mfu\":0.414,\"samples_per_second\":9812.5}}\n", step, 9 - step);
  write_file(folder / "metrics.jsonl", metrics + "{\"step\":9,\"lo");
  EXPECT_EQ(frame(folder, {.columns = 80}), R"(llama  4 ranks  shm  step 100  1:00  running
loss 1  lr 0.01  41 % MFU  9.8k samples/s

       8  #########.........
          ##################.........
          ###########################........
          ###################################:::::::::
          ############################################:::::::::
       1  ##############################################################........
          loss, steps 1 to 8

  rank     step  steps/s  compute        waits           memory  where
     0      100      2.0  [###   ]  50%  [##    ]  40%   3.1 GB  backward of lay
     1      100      2.0  [###   ]  50%  [##    ]  40%   3.1 GB  backward of lay
!    2      100      2.0  [##### ]  90%  [      ]   2%  computes 1.8x as long as
!    3       18      2.0  [###   ]  50%  [##    ]  40%  last seen 0:41 ago; back
)");
  EXPECT_THAT(frame(folder, {.columns = 80, .glyphs = train::Glyphs::Blocks}), AllOf(HasSubstr("▕███   ▏"), HasSubstr("▇")));
  EXPECT_THAT(frame(folder, {.columns = 120}), HasSubstr("3.1 GB   0:41  last seen 0:41 ago; backward of layers.3\n"));
}

TEST(Top, OfManyRanksShowsTheWorstFirst) {
  const Folder folder;
  write_run(folder, 100);
  write_rank(folder, 70, {.step = 90});
  write_rank(folder, 80, {.compute = 0.9, .waits = 0.02});
  std::filesystem::remove(folder / "rank-90.jsonl");
  const auto text = frame(folder, {.columns = 120, .rows = 10});
  const auto rows = lines(text);
  ASSERT_EQ(rows.size(), 9U) << text;  // one is for the cursor
  EXPECT_THAT(rows[4], AllOf(HasSubstr("!   90  nothing seen yet")));
  EXPECT_THAT(rows[5], AllOf(HasSubstr("!   70 "), HasSubstr("about 10 steps behind")));
  EXPECT_THAT(rows[6], AllOf(HasSubstr("!   80 "), HasSubstr("computes 1.8x as long as most")));
  EXPECT_EQ(rows[8], "  ... and 96 more");
  const auto few = lines(frame(folder, {.columns = 20, .rows = 5}));
  ASSERT_EQ(few.size(), 4U);
  EXPECT_EQ(few[1], "  rank     step");
  EXPECT_EQ(few[2], "!   90  nothing seen");
  EXPECT_EQ(lines(frame(folder, {.columns = 30, .rows = 5}))[1], "  rank     step  steps/s");
}

TEST(Top, OfARunThatHasEndedNobodyIsLate) {
  const Folder folder;
  write_run(folder, 2, "done");
  write_rank(folder, 1, {.age = 50, .step = 10});
  EXPECT_THAT(frame(folder), AllOf(HasSubstr("1:00  done\n"), Not(HasSubstr("!"))));
  write_run(folder, 2);
  for (const int rank : {0, 1}) write_rank(folder, rank, {.age = 50, .compute = rank == 0 ? 0.5 : 0.9, .waits = rank == 0 ? 0.4 : 0.02});
  EXPECT_THAT(frame(folder), AllOf(HasSubstr("1:00  no rank seen for 0:50\n"), Not(HasSubstr("!"))));
}

TEST(Top, ReadsTheEndsOfLongFiles) {
  const Folder folder;
  write_run(folder, 1);
  std::string metrics;
  for (int step = 1; step <= 20'000; step++) metrics += fmt::format("{{\"step\":{},\"accuracy\":0.5}}\n", step);
  write_file(folder / "metrics.jsonl", metrics);
  const auto run = read_run(folder.path(), Extent::Ends);
  EXPECT_LT(run.metrics.at("accuracy").size(), 12'000U);
  EXPECT_EQ(run.metrics.at("accuracy").back().first, 20'000);
  EXPECT_THAT(frame(folder), HasSubstr("accuracy, steps "));
}

TEST(Top, SaysWhatIsNoRun) {
  const Folder folder;
  EXPECT_THAT(message_of<ConfigError>([&] { read_run(folder.path(), Extent::Ends); }), AllOf(HasSubstr("has no run.json"), HasSubstr("--record")));
  for (const std::string text : {"", "[]", "{}", R"({"world":0})", R"({"world":"two"})", R"({"world":1e9})"}) {
    write_file(folder / "run.json", text);
    EXPECT_THAT(message_of<ConfigError>([&] { read_run(folder.path(), Extent::Ends); }), HasSubstr("run.json")) << text;
  }
  write_run(folder, 2);
  write_file(folder / "rank-0.jsonl", "7\n{\"step\":\"x\"}\n{}\n");
  write_file(folder / "metrics.jsonl", "7\n{\"step\":1,\"loss\":null}\n");
  EXPECT_THAT(frame(folder), HasSubstr("2 ranks"));
}

Command top(const Command& flags) {
  Command command = {std::filesystem::path(this_program()).parent_path().parent_path() / "bin/tessera", "top"};
  command.insert(command.end(), flags.begin(), flags.end());
  return command;
}

TEST(Top, WithoutATerminalPrintsOnce) {
  const Folder folder;
  const auto missing = Launched(top({folder.path()})).end();
  EXPECT_EQ(missing.status, 1);
  EXPECT_THAT(missing.err, HasSubstr("has no run.json"));
  write_run(folder, 2, "done");
  const auto ended = Launched(top({folder.path()})).end();
  EXPECT_EQ(ended.status, 0) << ended.err;
  EXPECT_THAT(ended.out, AllOf(HasSubstr("llama  2 ranks  shm  step 100"), Not(HasSubstr("\x1b"))));
}

TEST(Top, OnATerminalStaysUntilItOrTheRunIsEnded) {
  const Folder folder;
  for (const std::string how : {"q", "\x03", "signal", "done", "interrupted"}) {
    write_run(folder, 2);
    OnTerminal terminal(top({folder.path()}), {{"TERM", "xterm"}, {"LC_ALL", "C"}});
    terminal.wait_for({"\x1b[Hllama  2 ranks"});
    const winsize small{.ws_row = 10, .ws_col = 30, .ws_xpixel = 0, .ws_ypixel = 0};
    ::ioctl(terminal.keyboard.get(), TIOCSWINSZ, &small);
    terminal.wait_for({"\x1b[Hllama  2 ranks  shm  step 100\x1b[K"});
    if (how == "signal") {
      ::kill(terminal.process.pid(), SIGTERM);
    } else if (how == "done" || how == "interrupted") {
      write_run(folder, 2, how);
    } else {
      EXPECT_EQ(::write(terminal.keyboard.get(), how.data(), 1), 1);
    }
    EXPECT_THAT(terminal.screen(), HasSubstr("\x1b[?25h"));  // the cursor is shown again
    EXPECT_EQ(terminal.process.wait(std::chrono::seconds(10)), how == "signal" ? 128 + SIGTERM : 0);
    termios state{};
    ::tcgetattr(terminal.keyboard.get(), &state);
    EXPECT_TRUE((state.c_lflag & ICANON) != 0 && (state.c_lflag & ECHO) != 0) << how;
  }
}

}  // namespace
}  // namespace tessera::cli::reports::top_test
