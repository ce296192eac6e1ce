// MLflow's own client reads the runs of MlFlowReporter.
#include "tessera/train/mlflow_reporter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tests/testing/folder.h"
#include "tests/testing/run_program.h"
#include "tests/testing/transports.h"

namespace tessera::train::mlflow_reporter_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using namespace tessera::testing;

/// The folders of the runs in a store.
std::vector<std::filesystem::path> runs_in(const Folder& store) {
  std::vector<std::filesystem::path> runs;
  for (const auto& entry : std::filesystem::directory_iterator(store / "0")) {
    if (entry.is_directory()) runs.push_back(entry.path());
  }
  return runs;
}

TEST(MlFlowReports, AreLinesInFilesOfMetrics) {
  const Folder store;
  MlFlowReporter(store.path()).write(3, {{"train/loss", 0.5}, {"lr", 1e-7}, {"größe <1>", std::numeric_limits<double>::infinity()}, {"../up", 1}});
  ASSERT_EQ(runs_in(store).size(), 1U);
  const auto run = runs_in(store).front();
  EXPECT_THAT(read_file(run / "metrics/train/loss"), MatchesRegex("[0-9]+ 0\\.5 3\n"));
  EXPECT_THAT(read_file(run / "metrics/lr"), HasSubstr(" 1e-07 3\n"));
  EXPECT_THAT(read_file(run / "metrics/größe _1_"), HasSubstr(" inf 3\n"));
  EXPECT_THAT(read_file(run / "metrics/_./up"), HasSubstr(" 1 3\n"));
  EXPECT_THAT(read_file(run / "meta.yaml"), HasSubstr("\nstatus: 3\n"));
  EXPECT_THAT(read_file(store / "0/meta.yaml"), HasSubstr("name: Default\n"));
}

TEST(MlFlowReports, AreReadByMlflow) {
  const Folder store;
  {
    MlFlowReporter first(store.path());
    for (int step = 1; step <= 3; step++) first.write(step, {{"loss", 1.0 / step}, {"train/größe", std::nan("")}});
  }
  MlFlowReporter second(store.path());  // still runs
  second.write(1, {{"loss", 2}});
  const auto read = run_program({TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/trackers.py", "mlflow", store.path()});
  if (read.status == kNoPackage) GTEST_SKIP() << "build/python/trackers has no package mlflow-skinny";
  const std::string name = program_invocation_short_name;
  EXPECT_EQ(read.output, "[[\"Default\"], [[\"" + name +
                             R"(", "FINISHED", {"loss": [[1, 1.0], [2, 0.5], [3, 0.3333333333333333]], )"
                             R"("train/gr\u00f6\u00dfe": [[1, NaN], [2, NaN], [3, NaN]]}], [")" +
                             name +
                             R"(", "RUNNING", {"loss": [[1, 2.0]]}]]])"
                             "\n");
}

TEST(MlFlowReports, OfARunThatFailsSaySo) {
  const Folder store;
  try {
    MlFlowReporter reporter(store.path());
    throw std::runtime_error("the run failed");
  } catch (const std::runtime_error&) {  // as meant
  }
  EXPECT_THAT(read_file(runs_in(store).front() / "meta.yaml"), HasSubstr("\nstatus: 4\n"));
}

TEST(MlFlowReports, ErrorsNameTheFile) {
  const Folder folder;
  write_file(folder / "file", "");
  EXPECT_THAT(message_of<IoError>([&] { MlFlowReporter(folder / "file"); }), HasSubstr((folder / "file").string()));
  MlFlowReporter reporter(folder / "store");
  reporter.write(5, {{"loss", 1}});
  EXPECT_THAT(message_of<IoError>([&] { reporter.write(5, {{"loss/x", 1}}); }), HasSubstr("metrics/loss"));  // a file and a folder
  MlFlowReporter(folder / "other", {.rank = 1}).write(0, {});
  EXPECT_FALSE(std::filesystem::exists(folder / "other"));
}

}  // namespace
}  // namespace tessera::train::mlflow_reporter_test
