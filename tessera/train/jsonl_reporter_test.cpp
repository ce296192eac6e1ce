#include "tessera/train/jsonl_reporter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/base/process.h"
#include "tests/testing/transports.h"

namespace tessera::train::jsonl_reporter_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;

class JsonlReports : public ::testing::Test {
 protected:
  JsonlReports() { std::filesystem::remove_all(folder_); }
  ~JsonlReports() override { std::filesystem::remove_all(folder_); }

  std::string text() const {
    std::ifstream stream(path_);
    return {std::istreambuf_iterator<char>(stream), {}};
  }
  void put(const std::string& text) const {
    std::filesystem::create_directories(path_.parent_path());
    std::ofstream(path_) << text;
  }

  const std::filesystem::path folder_ = std::filesystem::temp_directory_path() / ("tessera-metrics-" + std::to_string(::getpid()));
  const std::filesystem::path path_ = folder_ / "runs" / "first" / "metrics.jsonl";
};

TEST_F(JsonlReports, EachStepIsALineThatCanBeReadAtOnce) {
  JsonlReporter file(path_);
  file.write(17, {{"loss", 0.4123F}, {"lr", 0.02}, {"grad_norm", 1.25}});
  EXPECT_EQ(text(), "{\"step\":17,\"loss\":0.4123,\"lr\":0.02,\"grad_norm\":1.25}\n");
  file.write(18, {});
  EXPECT_THAT(text(), ::testing::EndsWith("\n{\"step\":18}\n"));
}

TEST_F(JsonlReports, AnyNumberAndAnyNameIsJson) {
  using Limits = std::numeric_limits<double>;
  const Values values = {{"third", 1.0 / 3},
                         {"small", Limits::denorm_min()},
                         {"large", Limits::max()},
                         {"whole", 3},
                         {"zero", -0.0},
                         {"single", 1.0F / 3},
                         {"nan", Limits::quiet_NaN()},
                         {"inf", -Limits::infinity()},
                         {"a \"b\" \\ \t ä", 1e-7}};
  JsonlReporter(path_).write(0, values);
  Process python({"python3", "-c",
                  "import json, struct, sys\n"
                  "row = json.loads(open(sys.argv[1]).read())\n"
                  "assert row['third'] == 1/3 and row['small'] == 5e-324 and row['large'] == sys.float_info.max\n"
                  "assert row['whole'] == 3 and row['zero'] == 0\n"
                  "single = lambda x: struct.pack('f', x)\n"
                  "assert single(row['single']) == single(struct.unpack('f', bytes.fromhex('abaaaa3e'))[0])\n"
                  "assert row['nan'] is None and row['inf'] is None and row['a \"b\" \\\\ \\t \\u00e4'] == 1e-7\n"
                  "print(len(row), 'read')",
                  path_},
                 {}, Process::Output::Capture);
  EXPECT_EQ(python.read_output(), "10 read\n");
  EXPECT_EQ(python.wait(std::chrono::seconds(10)), 0);
}

TEST_F(JsonlReports, ResumedRunHasEachStepOnce) {
  {
    JsonlReporter first(path_);
    for (int step = 0; step < 5; step++) first.write(step, {{"run", 1}});
  }
  std::ofstream(path_, std::ios::app) << "{\"step\":5,\"ru";  // cut off by a crash
  JsonlReporter second(path_, {.first_step = 3});
  second.write(3, {{"run", 2}});
  second.write(4, {{"run", 2}});
  EXPECT_EQ(text(),
            "{\"step\":0,\"run\":1}\n{\"step\":1,\"run\":1}\n{\"step\":2,\"run\":1}\n"
            "{\"step\":3,\"run\":2}\n{\"step\":4,\"run\":2}\n");
}

TEST_F(JsonlReports, HalfALineGoesAlsoBeforeTheStep) {
  put("{\"step\":1}\n{\"step\":2");
  JsonlReporter(path_, {.first_step = 20}).write(20, {});
  EXPECT_EQ(text(), "{\"step\":1}\n{\"step\":20}\n");
}

TEST_F(JsonlReports, AFreshRunBeginsAFreshFile) {
  put("{\"step\":1}\n");
  const JsonlReporter file(path_);
  EXPECT_EQ(text(), "");
}

TEST_F(JsonlReports, OneThatIsMissingWhenResumedBeginsThere) {
  JsonlReporter(path_, {.first_step = 7}).write(7, {});
  EXPECT_EQ(text(), "{\"step\":7}\n");
}

TEST_F(JsonlReports, OtherFilesAreNotCut) {
  put("{\"step\":1}\nmy diary\n");
  EXPECT_THAT(message_of<IoError>([&] { JsonlReporter(path_, {.first_step = 5}); }),
              AllOf(HasSubstr("line 2 of " + path_.string()), HasSubstr("my diary")));
  EXPECT_EQ(text(), "{\"step\":1}\nmy diary\n");
}

TEST_F(JsonlReports, StepsComeInAnyOrder) {
  JsonlReporter file(path_, {.first_step = 3});
  file.write(3, {});
  file.write(3, {{"test_loss", 1}});
  file.write(1, {{"accuracy", 1}});
  EXPECT_EQ(text(), "{\"step\":3}\n{\"step\":3,\"test_loss\":1}\n{\"step\":1,\"accuracy\":1}\n");
}

TEST_F(JsonlReports, OfValuesThatCountSomethingElseAreKeptUpToTheirs) {
  const std::string first = "{\"step\":9,\"loss\":1}\n{\"step\":1,\"accuracy\":1}\n{\"step\":10,\"loss\":1}\n";
  put(first + "{\"step\":2,\"accuracy\":1}\n{\"step\":11,\"loss\":1}\n");
  JsonlReporter(path_, {.first_step = 12, .first_of = {{"accuracy", 2}}});
  EXPECT_EQ(text(), first);
}

TEST_F(JsonlReports, ValuesHaveNamesOfTheirOwn) {
  JsonlReporter file(path_);
  for (const std::string name : {"", "step", "\xff"}) {
    EXPECT_THAT(message_of<UsageError>([&] { file.write(1, {{name, 1}}); }), HasSubstr("can't be called '" + name)) << name;
  }
  EXPECT_THAT(message_of<UsageError>([&] { file.write(1, {{"a", 1}, {"b", 1}, {"a", 2}}); }), HasSubstr("are called 'a'"));
  EXPECT_EQ(text(), "");
}

TEST_F(JsonlReports, ADeviceIsNotReadBack) {
  JsonlReporter("/dev/zero", {.first_step = 5}).write(5, {});
}

TEST_F(JsonlReports, AFullDiskIsAnErrorThatNamesTheFile) {
  JsonlReporter file("/dev/full");
  EXPECT_THAT(message_of<IoError>([&] { file.write(4, {}); }),
              AllOf(HasSubstr("step 4"), HasSubstr("/dev/full"), HasSubstr("No space left")));
}

TEST_F(JsonlReports, APathThatCannotBeIsAnErrorThatNamesTheFile) {
  put("");
  const auto below_a_file = path_ / "metrics.jsonl";
  EXPECT_THAT(message_of<IoError>([&] { JsonlReporter(below_a_file, {}); }), HasSubstr(below_a_file.string()));
  EXPECT_THAT(message_of<IoError>([&] { JsonlReporter(folder_, {}); }), AllOf(HasSubstr(folder_.string()), HasSubstr("Is a directory")));
  EXPECT_THAT(message_of<IoError>([&] { JsonlReporter(folder_, {.first_step = 1}); }), HasSubstr(folder_.string()));
}

TEST_F(JsonlReports, OtherRanksTouchNothing) {
  JsonlReporter(path_, {.rank = 1}).write(0, {});
  EXPECT_FALSE(std::filesystem::exists(folder_));
}

}  // namespace
}  // namespace tessera::train::jsonl_reporter_test
