// Files and folders get their name only when they are complete, and unfinished ones are removed.
#include "tessera/base/atomic_write.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tests/testing/folder.h"

namespace tessera::testing::atomic_write_test {
namespace {

using std::filesystem::exists;

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

TEST(NewFile, AppearsWhenItIsComplete) {
  const Folder folder;
  const auto path = folder / "a";
  write_file(path, "before");
  {
    NewFile file(path);
    file.write(bytes_of("half"));
  }
  EXPECT_EQ(read_file(path), "before");
  EXPECT_FALSE(exists(unfinished_path(path)));
  NewFile file(path);
  file.write(bytes_of("all "));
  file.write(bytes_of("of it"));
  EXPECT_EQ(read_file(path), "before");
  file.commit();
  EXPECT_EQ(read_file(path), "all of it");
  EXPECT_FALSE(exists(unfinished_path(path)));
}

TEST(NewFile, OfAFolderThatIsNotThereIsRefused) {
  const Folder folder;
  EXPECT_THROW(NewFile(folder / "none/a"), IoError);
}

TEST(NewFolder, AppearsWhenItIsComplete) {
  const Folder folder;
  const auto path = folder / "new/a";
  const auto part = unfinished_path(path);
  {
    const NewFolder made(path);
    write_file(part / "file", "half");
  }
  EXPECT_FALSE(exists(part));
  NewFolder made(path);
  write_file(part / "file", "all");
  EXPECT_FALSE(exists(path));
  made.commit();
  EXPECT_EQ(read_file(path / "file"), "all");
  EXPECT_FALSE(exists(part));
  EXPECT_THROW(NewFolder again(path), IoError);
  EXPECT_EQ(read_file(path / "file"), "all");
}

TEST(NewFolder, ClearsWhatWasLeftAndLeavesWhatOthersWrite) {
  const Folder folder;
  const auto part = unfinished_path(folder / "a");
  std::filesystem::create_directories(part);
  write_file(part / "torn", "by a crash");
  {
    NewFolder made(folder / "a");
    EXPECT_FALSE(exists(part / "torn"));
    made.abandon();
  }
  EXPECT_TRUE(exists(part));
}

}  // namespace
}  // namespace tessera::testing::atomic_write_test
