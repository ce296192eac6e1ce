// TensorBoard's own reader reads the event files of TensorBoardReporter.
#include "tessera/train/tensorboard_reporter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tests/testing/folder.h"
#include "tests/testing/run_program.h"
#include "tests/testing/transports.h"

namespace tessera::train::tensorboard_reporter_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;

std::string read_by_tensorboard(const std::filesystem::path& folder) {
  const auto [status, output] = testing::run_program({TESSERA_TEST_TENSORBOARD_PYTHON, TESSERA_ROOT "/tests/python/tensorboard_files.py", folder});
  EXPECT_EQ(status, 0) << output;
  return output.substr(output.find('{'));
}

std::vector<std::filesystem::path> files_of(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) files.push_back(entry.path());
  std::ranges::sort(files);
  return files;
}

TEST(TensorBoardReports, AreScalars) {
  const testing::Folder folder;
  TensorBoardReporter board(folder / "runs/first");
  board.write(0, {{"train/loss", 0.5}, {"größe", 1e-7}});
  board.write(3'000'000'000, {{"train/loss", std::numeric_limits<double>::infinity()}, {std::string(300, 'n'), -2}});
  board.write(3'000'000'000, {});
  EXPECT_EQ(read_by_tensorboard(folder / "runs/first"),  // while it is being written
            "{\"train/loss\": [[0, 0.5], [3000000000, Infinity]], \"gr\\u00f6\\u00dfe\": [[0, 1.0000000116860974e-07]], \"" +
                std::string(300, 'n') + "\": [[3000000000, -2.0]]}\n");
}

TEST(TensorBoardReports, ResumedRunHasEachStepOnce) {
  const testing::Folder folder;
  {
    TensorBoardReporter first(folder.path());
    for (int step = 1; step <= 5; step++) first.write(step, {{"run", 1}});
  }
  std::ofstream(files_of(folder.path()).front(), std::ios::app) << "cut off by a crash";
  {
    TensorBoardReporter second(folder.path(), {.first_step = 3});  // in the same second
    second.write(2, {{"accuracy", 9}});
    second.write(3, {{"run", 2}});
    second.write(4, {{"run", 2}});
  }
  EXPECT_EQ(read_by_tensorboard(folder.path()), R"({"run": [[1, 1.0], [2, 1.0], [3, 2.0], [4, 2.0]], "accuracy": [[2, 9.0]]})"
                                                "\n");
  TensorBoardReporter(folder.path()).write(1, {{"run", 3}});
  EXPECT_EQ(read_by_tensorboard(folder.path()), "{\"run\": [[1, 3.0]], \"accuracy\": []}\n");
  EXPECT_EQ(files_of(folder.path()).size(), 3U);
}

TEST(TensorBoardReports, HaveStepsAndEpochs) {
  const testing::Folder folder;
  {
    TensorBoardReporter first(folder.path());
    for (int step = 1; step <= 4; step++) {
      first.write(step, {{"run", 1}});
      if (step % 2 == 0) first.write(step / 2, {{"accuracy", 1}});
    }
  }
  TensorBoardReporter(folder.path(), {.first_step = 4, .first_of = {{"accuracy", 2}}}).write(4, {{"run", 2}});
  EXPECT_EQ(read_by_tensorboard(folder.path()), R"({"run": [[1, 1.0], [2, 1.0], [3, 1.0], [4, 2.0]], "accuracy": [[1, 1.0], [2, 1.0]]})"
                                                "\n");
}

TEST(TensorBoardReports, ErrorsNameTheFile) {
  const testing::Folder folder;
  testing::write_file(folder / "file", "");
  EXPECT_THAT(message_of<IoError>([&] { TensorBoardReporter(folder / "file"); }), HasSubstr((folder / "file").string()));
  TensorBoardReporter board(folder / "board", {.first_step = 5});
  const testing::FullDisk full(100);
  EXPECT_THAT(message_of<IoError>([&] { board.write(5, {{"loss", 1}}); }), AllOf(HasSubstr("step 5"), HasSubstr("events.out.tfevents.")));
}

TEST(TensorBoardReports, OtherRanksTouchNothing) {
  const testing::Folder folder;
  TensorBoardReporter(folder / "board", {.rank = 1}).write(0, {});
  EXPECT_FALSE(std::filesystem::exists(folder / "board"));
}

}  // namespace
}  // namespace tessera::train::tensorboard_reporter_test
