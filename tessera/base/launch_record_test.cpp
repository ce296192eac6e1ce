#include "tessera/base/launch_record.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "tessera/base/process.h"

namespace tessera::launch_record_test {
namespace {

/// Sets the path for record_failure() during its lifetime.
struct Announced {
  explicit Announced(const std::string& path) { ::setenv(LaunchRecord::kVariable, path.c_str(), 1); }
  ~Announced() { ::unsetenv(LaunchRecord::kVariable); }
};

TEST(LaunchRecord, HasTheCulpritThatARankNamedLast) {
  const LaunchRecord record;
  const Announced announced(record.path());
  record_failure(0, 2);
  Process({"sh", "-c", "echo; echo junk 5; echo 7; echo 1 junk"}, {}, {}, [path = record.path()] {
    ::dup2(::open(path.c_str(), O_WRONLY | O_APPEND), STDOUT_FILENO);
  }).wait(std::chrono::seconds(10));
  record_failure(1, 0);
  record_failure(1, 17);
  auto ranks = record.read();
  EXPECT_EQ(ranks[0].culprit, 2);
  EXPECT_EQ(ranks[1].culprit, 17);
  EXPECT_EQ(ranks[2].culprit, std::nullopt);
}

TEST(LaunchRecord, ForgetsTheCulpritOfARankThatGoesOn) {
  const LaunchRecord record;
  const Announced announced(record.path());
  record_failure(0, 2);
  record_failure(1, 2);
  record_recovery(0);  // not the rank that failed last in this process
  record_recovery(1);
  record_recovery(1);  // only the first recovery after a failure is recorded
  EXPECT_EQ(record.read()[0].culprit, 2);
  EXPECT_EQ(record.read()[1].culprit, std::nullopt);
  record_failure(1, 0);
  EXPECT_EQ(record.read()[1].culprit, 0);
}

TEST(LaunchRecord, ForgetsTheCulpritOfAStepThatFailsBecauseOfAnotherRankLater) {
  const LaunchRecord record;
  const Announced announced(record.path());
  ::setenv("RANK", "2", 1);
  record_failure_in_world(2, 0, /*in_step=*/true);
  EXPECT_EQ(record.read()[2].culprit, 0);
  record_failure(0, 2);
  EXPECT_EQ(record.read()[2].culprit, std::nullopt);
  EXPECT_EQ(record.read()[0].culprit, 2);
  // A culprit that is recorded afterwards counts.
  record_failure_in_world(2, 0, /*in_step=*/true);
  EXPECT_EQ(record.read()[2].culprit, 0);
  // So does one that is named because its connection has failed, even if it fails later.
  record_failure(2, 0);
  record_failure(0, 1);
  EXPECT_EQ(record.read()[2].culprit, 0);
  ::unsetenv("RANK");
}

TEST(LaunchRecord, TellsWhoWaitsAtTheStart) {
  const LaunchRecord record;
  const Announced announced(record.path());
  record_start(0);
  record_joined(0);
  record_start(0);
  record_start(1);
  record_joined(1);
  auto ranks = record.read();
  EXPECT_TRUE(ranks[0].waits());
  EXPECT_EQ(ranks[0].starts, 2);
  EXPECT_FALSE(ranks[1].waits());
  EXPECT_FALSE(ranks[2].waits());
}

TEST(LaunchRecord, TellsWhoHasReadTheSettings) {
  const LaunchRecord record;
  const Announced announced(record.path());
  record_joined(0);
  record_settings(1);
  auto ranks = record.read();
  EXPECT_FALSE(ranks[0].read_settings);
  EXPECT_TRUE(ranks[1].read_settings);
  EXPECT_EQ(ranks[1].joined, 0);
}

TEST(LaunchRecord, IsReachableWithoutAnInheritedDescriptor) {
  const LaunchRecord record;
  Process rank({"sh", "-c", "echo 1 3 >>$" + std::string(LaunchRecord::kVariable)}, {{LaunchRecord::kVariable, record.path()}});
  EXPECT_EQ(rank.wait(std::chrono::seconds(10)), 0);
  EXPECT_EQ(record.read()[1].culprit, 3);
}

TEST(LaunchRecord, IsOptional) {
  record_failure(0, 1);
  std::string gone;
  {
    const LaunchRecord record;
    gone = record.path();
  }
  const Announced announced(gone);
  record_failure(0, 1);
}

// The path of a launcher outside this container may be another file inside it.
TEST(LaunchRecord, IsNotWrittenToOtherFiles) {
  const auto path = std::filesystem::temp_directory_path() / ("tessera-other-file-" + std::to_string(::getpid()));
  std::ofstream file(path);
  const auto link = std::filesystem::path(path).concat("-link");
  std::filesystem::create_symlink(path, link);
  for (const auto& place : {path, link}) {
    const Announced announced(place);
    record_failure(0, 1);
  }
  EXPECT_EQ(std::filesystem::file_size(path), 0);
  std::filesystem::remove(link);
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace tessera::launch_record_test
