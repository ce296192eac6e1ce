#include "tessera/train/reporters.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tests/testing/folder.h"
#include "tests/testing/transports.h"

namespace tessera::train::reporters_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;

size_t files_in(const std::filesystem::path& folder) {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
}

TEST(Reporters, AreWhatTheNamesOfFilesSay) {
  const testing::Folder folder;
  std::filesystem::create_directories(folder / "lr.02");
  Reporters all({folder / "a/b.jsonl", folder / "c.csv", folder / "board", folder / "lr.01/", folder / "lr.02"});
  all.write(1, {{"loss", 0.5}});
  EXPECT_EQ(testing::read_file(folder / "a/b.jsonl"), "{\"step\":1,\"loss\":0.5}\n");
  EXPECT_EQ(testing::read_file(folder / "c.csv"), "step,loss\n1,0.5\n");
  for (const auto* name : {"board", "lr.01", "lr.02"}) EXPECT_EQ(files_in(folder / name), 1U) << name;
  Reporters({}).write(1, {{"loss", 0.5}});
}

TEST(Reporters, RefuseWhatSaysNothing) {
  const testing::Folder folder;
  testing::write_file(folder / "file", "");
  for (const std::string name : {"", "metrics.txt", "metrics.JSONL", "lr.01"}) {
    EXPECT_THAT(message_of<ConfigError>([&] { make_reporter(name); }), AllOf(HasSubstr("'" + name + "'"), HasSubstr("FOLDER/")));
  }
  EXPECT_THAT(message_of<ConfigError>([&] { make_reporter(folder / "file"); }), HasSubstr("FILE.csv"));
}

}  // namespace
}  // namespace tessera::train::reporters_test
