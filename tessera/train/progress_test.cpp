#include "tessera/train/progress.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/ioctl.h>

#include <limits>
#include <memory>

#include "tessera/base/error.h"
#include "tessera/base/fd.h"
#include "tessera/base/process.h"
#include "tests/testing/transports.h"

namespace tessera::train::progress_test {
namespace {

using namespace std::chrono_literals;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::Not;

constexpr auto kBlocks = Glyphs::Blocks;

const ProgressState kState = {.title = "epoch 1/2",
                              .step = 788,
                              .steps = 1875,
                              .values = {{"loss", 0.4121}, {"accuracy", 0.853}},
                              .rate = 9800,
                              .unit = "samples",
                              .left = 14};

TEST(Bar, TakesTheRoomThatIsThere) {
  EXPECT_EQ(render_bar(kState, 20, kBlocks), "epoch 1/2  42%");
  EXPECT_EQ(render_bar(kState, 40, kBlocks), "epoch 1/2  42%  788/1875  loss 0.412");
  EXPECT_EQ(render_bar(kState, 80, kBlocks), "epoch 1/2  42% ▕█████▉        ▏  788/1875  loss 0.412  9.8k samples/s  0:14 left");
  EXPECT_EQ(render_bar(kState, 90, kBlocks), "epoch 1/2  42% ▕███▎    ▏  788/1875  loss 0.412  accuracy 0.853  9.8k samples/s  0:14 left");
  EXPECT_EQ(render_bar(kState, 90, Glyphs::Ascii),
            "epoch 1/2  42% [###     ]  788/1875  loss 0.412  accuracy 0.853  9.8k samples/s  0:14 left");
  // A bar across a wide screen would be far from its numbers.
  EXPECT_EQ(render_bar(kState, 200, Glyphs::Ascii).size(), 120U);
}

TEST(Bar, LeavesOutWhatIsNeededLeast) {
  const auto bar = [](int columns) { return render_bar(kState, columns, kBlocks); };
  EXPECT_EQ(bar(77), "epoch 1/2  42% ▕████▌      ▏  788/1875  loss 0.412  9.8k samples/s  0:14 left");
  EXPECT_EQ(bar(62), "epoch 1/2  42% ▕██▉    ▏  788/1875  loss 0.412  9.8k samples/s");
  EXPECT_EQ(bar(45), "epoch 1/2  42%  788/1875  loss 0.412");
}

TEST(Bar, NeverLongerThanTheScreenAndNeverCutsANumber) {
  for (int columns = 0; columns <= 200; columns++) {
    const auto text = render_bar(kState, columns, Glyphs::Ascii);
    EXPECT_LE(text.size(), static_cast<size_t>(columns));
    EXPECT_EQ(text.find("loss") != std::string::npos, text.find("loss 0.412") != std::string::npos) << text;
  }
}

TEST(Bar, CutsTitlesBetweenCharacters) {
  EXPECT_EQ(render_bar({.title = "Größe", .step = 1}, 4, kBlocks), "Größ");
  EXPECT_EQ(render_bar({.title = "学習中", .step = 1}, 5, kBlocks), "学習");  // two columns each
  EXPECT_EQ(render_bar({.title = "two\nlines", .step = 1}, 40, kBlocks), "two lines  1");
  EXPECT_EQ(render_bar({.title = "cut off \xe5", .step = 1}, 40, kBlocks), "cut off \xe5  1");
}

TEST(Bar, FillsFromNothingToAll) {
  const auto bar = [](int64_t step) { return render_bar({.step = step, .steps = 1000}, 24, kBlocks); };
  EXPECT_EQ(bar(0), "  0% ▕       ▏    0/1000");
  EXPECT_EQ(bar(500), " 50% ▕███▌   ▏  500/1000");
  EXPECT_EQ(bar(999), " 99% ▕██████▉▏  999/1000");
  EXPECT_EQ(bar(1000), "100% ▕███████▏ 1000/1000");
  EXPECT_EQ(bar(1200), "100% ▕███████▏ 1200/1000");
}

TEST(Bar, WithoutAKnownEndCounts) {
  EXPECT_EQ(render_bar({.title = "train", .step = 7, .values = {{"loss", 2}}}, 80, kBlocks), "train  7  loss 2.000");
  EXPECT_EQ(render_line({.title = "train", .step = 7, .values = {{"loss", 2}}}), "train step 7 loss 2.000");
}

TEST(Line, SaysWhatTheBarSays) {
  EXPECT_EQ(render_line(kState), "epoch 1/2 step 788/1875 loss 0.412 accuracy 0.853 9.8k samples/s 0:14 left");
}

TEST(Line, NumbersAreShort) {
  EXPECT_EQ(short_number(0.0312), "0.03");
  EXPECT_EQ(short_number(0.5), "0.50");
  EXPECT_EQ(short_number(9.96), "10");
  EXPECT_EQ(short_number(999.4), "999");
  EXPECT_EQ(short_number(999.6), "1.0k");
  EXPECT_EQ(short_number(12345), "12k");
  EXPECT_EQ(short_number(2.5e6), "2.5M");
  EXPECT_EQ(short_time(13.6), "0:14");
  EXPECT_EQ(short_time(3599.7), "1:00:00");
  EXPECT_EQ(short_time(100 * 3600 + 62), "100:01:02");
  EXPECT_EQ(short_time(std::numeric_limits<double>::infinity()), "ages");
  const auto shown = [](double value) { return render_line({.step = 1, .values = {{"v", value}}}); };
  EXPECT_EQ(shown(3e-4), "step 1 v 0.0003");
  EXPECT_EQ(shown(-12.5), "step 1 v -12.500");
  EXPECT_EQ(shown(12345), "step 1 v 12345");
  EXPECT_EQ(shown(std::numeric_limits<double>::quiet_NaN()), "step 1 v nan");
}

/// A display whose time and width the test sets.
struct FakeDisplay {
  std::string text;
  std::optional<int> columns;
  Display::Clock::time_point now{};

  Display display() {
    return {.write = [this](std::string_view more) { text += more; },
            .columns = [this] { return columns; },
            .now = [this] { return now; },
            .glyphs = Glyphs::Ascii};
  }
  std::string taken() { return std::exchange(text, ""); }
};

TEST(Progress, LinesComeEverySoManyStepsAndAtTheEnd) {
  FakeDisplay fake;
  {
    Progress progress({.title = "epoch 1/2", .steps = 250, .items_per_step = 10}, fake.display());
    for (int step = 1; step <= 250; step++) {
      fake.now += 100ms;
      progress.update(step, {{"loss", 1.0 / step}});
    }
  }
  EXPECT_EQ(fake.text,
            "epoch 1/2 step 100/250 loss 0.010 100 samples/s 0:15 left\n"
            "epoch 1/2 step 200/250 loss 0.005 100 samples/s 0:05 left\n"
            "epoch 1/2 step 250/250 loss 0.004 100 samples/s in 0:25\n");
}

TEST(Progress, ShowsTheItemsOfAStepAndValuesWithTheirUnit) {
  FakeDisplay fake;
  Progress progress({.steps = 10, .items_per_step = 4096, .items = "tokens", .line_every = 1}, fake.display());
  fake.now += 1s;
  progress.update(1, {{"memory", 3.21e9, Unit::Bytes}, {"mfu", 0.413, Unit::Part}});
  EXPECT_EQ(fake.taken(), "step 1/10 memory 3.21 GB 41 % MFU 4.1k tokens/s 0:09 left\n");
}

TEST(Progress, StepsThatAreSkippedCount) {
  FakeDisplay fake;
  Progress progress({.steps = 1000}, fake.display());
  for (const int step : {60, 120, 180, 240}) progress.update(step);
  EXPECT_EQ(fake.text, "step 120/1000\nstep 240/1000\n");
  fake.taken();
  progress.finish();
  progress.finish();
  EXPECT_EQ(fake.text, "step 240/1000 in 0:00\n");
  EXPECT_THAT(message_of<UsageError>([&] { progress.update(241); }), HasSubstr("make a new Progress"));
}

TEST(Progress, BarIsDrawnAtOnceTenTimesASecondAndAtTheEnd) {
  FakeDisplay fake;
  fake.columns = 63;
  {
    Progress progress({.title = "train", .steps = 100}, fake.display());
    EXPECT_EQ(fake.taken(), "\r\x1b[Ktrain   0% [" + std::string(38, ' ') + "]   0/100");
    fake.now += 50ms;
    progress.update(1);
    EXPECT_EQ(fake.taken(), "");
    fake.now += 50ms;
    progress.update(2);
    EXPECT_EQ(fake.taken(), "\r\x1b[Ktrain   2% [                ]   2/100  20 steps/s  0:05 left");
    fake.columns = 23;  // the window was made smaller
    fake.now += 100ms;
    progress.update(4);
    EXPECT_EQ(fake.taken(), "\r\x1b[Ktrain   4%   4/100");
    fake.columns = 63;
    progress.update(100);
    EXPECT_EQ(fake.taken(), "");
  }
  EXPECT_EQ(fake.taken(), "\r\x1b[Ktrain 100% [#################] 100/100  500 steps/s  in 0:00\n");
}

TEST(Progress, ARateForgetsWhatIsLongAgoAndWhatAnEarlierRunDid) {
  FakeDisplay fake;
  Progress progress({.steps = 2000, .start = 1000, .line_every = 1}, fake.display());
  fake.now += 10s;  // the first step prepares much
  progress.update(1001);
  EXPECT_EQ(fake.taken(), "step 1001/2000 0.10 steps/s 2:46:30 left\n");
  for (int step = 1002; step <= 1100; step++) {
    fake.now += 100ms;
    progress.update(step);
  }
  EXPECT_THAT(fake.taken(), EndsWith("step 1100/2000 10 steps/s 1:30 left\n"));
  fake.now += 100ms;
  progress.finish();
  EXPECT_EQ(fake.taken(), "step 1100/2000 5.0 steps/s in 0:20\n");
}

TEST(Progress, ExceptionsLeaveTheLastStateAndACleanLine) {
  FakeDisplay fake;
  fake.columns = 43;
  EXPECT_EQ(message_of<UsageError>([&] {
              Progress progress({.steps = 10}, fake.display());
              progress.update(3, {{"loss", 7}});
              throw UsageError("a wrong turn");
            }),
            "a wrong turn");
  EXPECT_THAT(fake.text, EndsWith("3/10  loss 7.000  in 0:00\n"));
  fake.taken();
  fake.columns.reset();
  {
    const Progress unused({.steps = 10}, fake.display());
  }
  EXPECT_EQ(fake.text, "");
}

TEST(Progress, WordsComeAboveTheBar) {
  FakeDisplay fake;
  fake.columns = 33;
  Progress progress({.title = "train", .steps = 9}, fake.display());
  const auto bar = fake.taken();
  progress.say("saved");
  EXPECT_EQ(fake.taken(), "\r\x1b[Ksaved\n" + bar);
  fake.columns.reset();
  progress.say("saved");
  EXPECT_EQ(fake.taken(), "saved\n");
  fake.columns = 33;
  progress.finish();
  fake.taken();
  progress.say("saved");
  EXPECT_EQ(fake.taken(), "saved\n");
}

TEST(Progress, OneThatVanishesLeavesNothing) {
  FakeDisplay fake;
  fake.columns = 33;
  {
    Progress progress({.title = "evaluating", .steps = 2, .at_end = AtEnd::Vanishes}, fake.display());
    fake.now += 1s;
    progress.update(1);
    EXPECT_THAT(fake.taken(), HasSubstr("evaluating  50%"));
  }
  EXPECT_EQ(fake.taken(), "\r\x1b[K");
  fake.columns.reset();
  {
    Progress progress({.title = "evaluating", .steps = 2, .line_every = 1, .at_end = AtEnd::Vanishes}, fake.display());
    progress.update(1);
    progress.update(2);
  }
  EXPECT_EQ(fake.text, "");
}

TEST(Progress, OtherRanksAreSilent) {
  FakeDisplay fake;
  for (const auto columns : {std::optional<int>(), std::optional<int>(80)}) {
    fake.columns = columns;
    Progress progress({.steps = 2, .line_every = 1, .rank = 1}, fake.display());
    fake.now += 1s;
    progress.update(1);
    progress.say("saved");
    progress.update(2);
  }
  EXPECT_EQ(fake.text, "");
}

/// An environment variable that a test changes and then gives back.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const auto* old = std::getenv(name)) old_ = old;
    value ? ::setenv(name, value, 1) : ::unsetenv(name);
  }
  Variable(Variable&&) = delete;
  ~Variable() { old_ ? ::setenv(name_, old_->c_str(), 1) : ::unsetenv(name_); }

 private:
  const char* name_;
  std::optional<std::string> old_;
};

std::string all_of(int fd) {
  std::string result;
  char buffer[4096];
  for (;;) {
    const auto count = ::read(fd, buffer, sizeof buffer);  // a terminal whose other end is closed ends in an error
    if (count <= 0) return result;
    result.append(buffer, static_cast<size_t>(count));
  }
}

void two_steps(int fd) {
  // A pointer to fclose as the deleter would lose the attributes that newer C libraries give it, which g++ warns of.
  const auto close = [](std::FILE* file) { std::fclose(file); };
  const std::unique_ptr<std::FILE, decltype(close)> file(::fdopen(fd, "w"), close);
  Progress progress({.title = "real", .steps = 2}, Display::of(file.get()));
  progress.update(1);
  progress.update(2);
}

std::string on_a_terminal(unsigned short columns) {
  int ours = -1, theirs = -1;
  winsize size{};
  size.ws_col = columns;
  if (::openpty(&ours, &theirs, nullptr, nullptr, &size) != 0) throw IoError("no terminal to test with");
  const Fd terminal(ours);
  two_steps(theirs);
  return all_of(terminal.get());
}

TEST(RealDisplay, ATerminalGetsABarThatEndsItsLine) {
  const Variable term("TERM", "xterm"), locale("LC_ALL", "C.UTF-8");
  const auto text = on_a_terminal(60);
  EXPECT_THAT(text, HasSubstr("\r\x1b[Kreal   0% ▕"));
  EXPECT_THAT(text, HasSubstr("\r\x1b[Kreal 100% ▕"));
  EXPECT_THAT(text, EndsWith("in 0:00\r\n"));
  EXPECT_EQ(std::ranges::count(text, '\n'), 1);
}

TEST(RealDisplay, EnvironmentSaysWhatTheTerminalDoesNot) {
  const Variable term("TERM", "xterm"), locale("LC_ALL", "C");
  const Variable columns("COLUMNS", "17");
  EXPECT_THAT(on_a_terminal(0), EndsWith("\x1b[Kreal 100% 2/2\r\n"));
  const Variable nonsense("COLUMNS", "wide");
  EXPECT_THAT(on_a_terminal(0), HasSubstr("real   0% [    "));
}

TEST(RealDisplay, APipeAndADumbTerminalGetLines) {
  Pipe pipe;
  two_steps(::fcntl(pipe.write.get(), F_DUPFD_CLOEXEC, 0));
  pipe.write = Fd();
  const auto text = all_of(pipe.read.get());
  EXPECT_THAT(text, ::testing::MatchesRegex("real step 2/2 .*in 0:00\n"));
  const Variable term("TERM", "dumb");
  EXPECT_THAT(on_a_terminal(40), Not(HasSubstr("\x1b")));
}

TEST(RealDisplay, BlocksNeedALocaleOfUnicode) {
  const Variable all("LC_ALL", nullptr), type("LC_CTYPE", nullptr);
  const Variable unset("LANG", nullptr);
  EXPECT_EQ(glyphs_of_locale(), Glyphs::Ascii);
  const Variable language("LANG", "de_DE.UTF-8");
  EXPECT_EQ(glyphs_of_locale(), Glyphs::Blocks);
  const Variable first("LC_ALL", "C");
  EXPECT_EQ(glyphs_of_locale(), Glyphs::Ascii);
}

}  // namespace
}  // namespace tessera::train::progress_test
