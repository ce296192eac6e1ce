#include "tessera/base/error_record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include "tessera/base/memory_file.h"
#include "tests/testing/folder.h"

namespace tessera::error_record_test {
namespace {

using testing::Folder;
using testing::write_file;

/// The error file of this process, as a launcher would set it.
struct ErrorFile {
  explicit ErrorFile(const std::string& path) { ::setenv(kErrorFile, path.c_str(), 1); }
  ~ErrorFile() { ::unsetenv(kErrorFile); }
};

TEST(ErrorRecord, KeepsTheFirstError) {
  const Folder folder;
  const auto path = folder / "error.json";
  EXPECT_FALSE(read_error_record(path));
  const auto before = std::chrono::system_clock::now();
  {
    const ErrorFile file(path);
    record_error("no \"such\" file\nin /data \xff");
    record_error("the others wait in vain");
  }
  const auto record = read_error_record(path);
  ASSERT_TRUE(record);
  EXPECT_EQ(record->message, "no \"such\" file\nin /data \xef\xbf\xbd");  // bytes that are not UTF-8 are replaced
  EXPECT_LT(record->when - before, std::chrono::minutes(1));
  EXPECT_GT(record->when - before, -std::chrono::minutes(1));
}

TEST(ErrorRecord, GoesIntoMemoryToo) {
  const MemoryFile memory("error-record-test");
  const ErrorFile file(memory.path());
  record_error("no such file");
  EXPECT_EQ(read_error_record(memory.path())->message, "no such file");
}

TEST(ErrorRecord, IsNotMissedWhereNobodyAsks) {
  record_error("nobody hears this");
  const ErrorFile nowhere("/no/such/folder/error.json");
  record_error("nor this");
}

TEST(ErrorRecord, ReadsWhatTorchWritesAndPlainText) {
  const Folder folder;
  const auto read = [&](const std::string& text) {
    write_file(folder / "error.json", text);
    const auto record = read_error_record(folder / "error.json");
    return record ? record->message : "none";
  };
  EXPECT_EQ(read(R"({"message": {"message": "ValueError: 3", "extraInfo": {"py_callstack": "...", "timestamp": "1700000000"}}})"),
            "ValueError: 3");
  EXPECT_EQ(read(R"({"message": "plain", "timestamp": 1700000000})"), "plain");
  EXPECT_EQ(read(""), "none");
  for (const auto* text :
       {"no space left", "{", "[]", "7", R"({"message": 7})", R"({"message": {"message": []}})", R"({"other": "x"})", "\xff\xfe"}) {
    EXPECT_EQ(read(text), text);
  }
}

}  // namespace
}  // namespace tessera::error_record_test
