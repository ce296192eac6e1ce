#include "tessera/train/csv_reporter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/base/process.h"
#include "tests/testing/folder.h"
#include "tests/testing/transports.h"

namespace tessera::train::csv_reporter_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;

struct CsvReports : ::testing::Test {
  std::string text() const { return testing::read_file(path); }

  const testing::Folder folder;
  const std::filesystem::path path = folder / "runs/metrics.csv";
};

TEST_F(CsvReports, AStepIsARowThatCanBeReadAtOnce) {
  CsvReporter file(path);
  EXPECT_EQ(text(), "step\n");
  file.write(17, {{"loss", 0.4123F}, {"lr", 0.02}});
  EXPECT_EQ(text(), "step,loss,lr\n17,0.4123,0.02\n");
  file.write(18, {{"lr", 0.01}});
  EXPECT_EQ(text(), "step,loss,lr\n17,0.4123,0.02\n18,,0.01\n");
}

TEST_F(CsvReports, ColumnsGrow) {
  CsvReporter file(path);
  file.write(1, {{"loss", 2}});
  file.write(2, {{"loss", 1}});
  file.write(3, {{"accuracy", 0.5}, {"loss", 1.5}, {"norm", 7}});
  EXPECT_EQ(text(), "step,loss,accuracy,norm\n1,2,,\n2,1,,\n3,1.5,0.5,7\n");
}

TEST_F(CsvReports, ReportsOfAStepShareItsRow) {
  CsvReporter file(path);
  file.write(1, {{"loss", 2.125}});
  file.write(1, {{"accuracy", 0.5}});
  EXPECT_EQ(text(), "step,loss,accuracy\n1,2.125,0.5\n");
  file.write(1, {{"loss", 3}});  // the later one counts, and is shorter
  EXPECT_EQ(text(), "step,loss,accuracy\n1,3,0.5\n");
  file.write(2, {});
  EXPECT_EQ(text(), "step,loss,accuracy\n1,3,0.5\n2,,\n");
}

TEST_F(CsvReports, AnyNumberAndAnyNameIsCsv) {
  using Limits = std::numeric_limits<double>;
  CsvReporter file(path);
  file.write(1, {{"a,b", 1.0 / 3}, {"said \"so\"", Limits::max()}, {"two\nlines", -std::nan("")}, {"ä", -Limits::infinity()}, {"f", 0.1F}});
  file.write(2, {{"late", 5e-324}});  // the columns are padded in spite of their names
  Process python({"python3", "-c",
                  "import csv, math, sys\n"
                  "first, second = csv.DictReader(open(sys.argv[1], newline=''))\n"
                  "assert float(first['a,b']) == 1/3 and float(first['said \"so\"']) == sys.float_info.max, first\n"
                  "assert math.isnan(float(first['two\\nlines'])) and float(first['ä']) == -math.inf and first['f'] == '0.1', first\n"
                  "assert first['late'] == '' and float(second['late']) == 5e-324 and second['f'] == '', second\n"
                  "print(len(second), 'read')",
                  path},
                 {{"PYTHONUTF8", "1"}}, Process::Output::Capture);
  EXPECT_EQ(python.read_output(), "7 read\n");
  EXPECT_EQ(python.wait(std::chrono::seconds(10)), 0);
}

TEST_F(CsvReports, ResumedRunHasEachStepOnce) {
  {
    CsvReporter first(path);
    for (int step = 0; step < 5; step++) first.write(step, {{"run", 1}, {"a,b", 1.0 * step}});
  }
  std::ofstream(path, std::ios::app) << "5,1";  // cut off by a crash
  CsvReporter second(path, {.first_step = 3});
  second.write(2, {{"accuracy", 9}});  // the last step of the earlier run gets another value
  second.write(3, {{"run", 2}});
  EXPECT_EQ(text(), "step,run,\"a,b\",accuracy\n0,1,0,\n1,1,1,\n2,1,2,9\n3,2,,\n");
}

TEST_F(CsvReports, BeginsWhereThereIsNoneYetAndAnew) {
  CsvReporter(path, {.first_step = 7}).write(7, {});
  EXPECT_EQ(text(), "step\n7\n");
  const CsvReporter anew(path);
  EXPECT_EQ(text(), "step\n");
}

TEST_F(CsvReports, GoesOnInFilesThatWereSavedByOthers) {
  testing::write_file(folder / "other.csv", "\"step\",\"loss\"\r\n\"1\",0.5\r\n2,0.25\r\n");
  CsvReporter(folder / "other.csv", {.first_step = 2}).write(2, {{"loss", 1}});
  EXPECT_EQ(testing::read_file(folder / "other.csv"), "step,loss\n1,0.5\n2,1\n");
}

TEST_F(CsvReports, OtherFilesAreNotTouched) {
  std::filesystem::create_directories(path.parent_path());
  for (const auto& [other, error] : {std::pair("dear diary\n", "'step' is not the first column"),
                                     {"step\n1\nmy diary\n", "row 2 ('my diary')"},
                                     {"step,loss\n1,2\n2\n", "row 2 ('2')"},
                                     {"step,loss\n1,2\n2,\"3\nmine", "row 2 ('2,\"3')"},
                                     {"step,lo", "'step' is not the first column"}}) {
    testing::write_file(path, other);
    EXPECT_THAT(message_of<IoError>([&] { CsvReporter(path, {.first_step = 5}); }), AllOf(HasSubstr(error), HasSubstr(path.string())));
    EXPECT_EQ(text(), other);
  }
}

TEST_F(CsvReports, ErrorsNameTheFile) {
  EXPECT_THAT(message_of<IoError>([&] { CsvReporter(folder.path()); }), AllOf(HasSubstr(folder.path().string()), HasSubstr("directory")));
  for (const int64_t first : {0, 5})
    EXPECT_THAT(message_of<IoError>([&] { CsvReporter("/dev/zero", {.first_step = first}); }),
                HasSubstr("/dev/zero is a pipe or a device"));
  CsvReporter file(path);
  file.write(1, {{"loss", 1}});
  {
    const testing::FullDisk full(20);
    EXPECT_THAT(message_of<IoError>([&] {
                  file.write(2, {{"loss", 0.123456789012}});
                }),
                AllOf(HasSubstr("step 2"), HasSubstr(path.string())));
  }
  file.write(3, {{"loss", 3}});  // there is room again: what was written in part is overwritten
  EXPECT_EQ(text(), "step,loss\n1,1\n3,3\n");
  file.write(2, {{"loss", 2}});  // values may count different things
  EXPECT_EQ(text(), "step,loss\n1,1\n3,3\n2,2\n");
}

TEST_F(CsvReports, OtherRanksTouchNothing) {
  CsvReporter(path, {.rank = 1}).write(0, {});
  EXPECT_FALSE(std::filesystem::exists(path.parent_path()));
}

}  // namespace
}  // namespace tessera::train::csv_reporter_test
