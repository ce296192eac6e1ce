#include "tessera/base/failure_record.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "tessera/base/process.h"

namespace tessera {
namespace {

/// Sets the path for record_failure() during its lifetime.
struct Announced {
  explicit Announced(const std::string& path) { ::setenv(FailureRecord::kVariable, path.c_str(), 1); }
  ~Announced() { ::unsetenv(FailureRecord::kVariable); }
};

TEST(FailureRecord, HasTheCulpritThatARankNamedLast) {
  const FailureRecord record;
  const Announced announced(record.path());
  record_failure(0, 2);
  record_failure(1, 0);
  record_failure(1, 17);
  EXPECT_EQ(record.culprit_of(0), 2);
  EXPECT_EQ(record.culprit_of(1), 17);
  EXPECT_EQ(record.culprit_of(2), std::nullopt);
}

TEST(FailureRecord, IsReachableWithoutAnInheritedDescriptor) {
  const FailureRecord record;
  Process rank({"sh", "-c", "echo 1 3 >>$" + std::string(FailureRecord::kVariable)}, {{FailureRecord::kVariable, record.path()}});
  EXPECT_EQ(rank.wait(std::chrono::seconds(10)), 0);
  EXPECT_EQ(record.culprit_of(1), 3);
}

TEST(FailureRecord, IsOptional) {
  record_failure(0, 1);
  std::string gone;
  {
    const FailureRecord record;
    gone = record.path();
  }
  const Announced announced(gone);
  record_failure(0, 1);
}

// The path of a launcher outside this container may be another file inside it.
TEST(FailureRecord, IsNotWrittenToOtherFiles) {
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
}  // namespace tessera
