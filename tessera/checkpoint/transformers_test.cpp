// transformers loads the folders that merge() makes of checkpoints of its models.
#include <gtest/gtest.h>

#include "tessera/checkpoint/merge.h"
#include "tests/testing/folder.h"
#include "tests/testing/run_program.h"

namespace tessera::testing::transformers_test {
namespace {

Ended python(const std::vector<std::string>& arguments) {
  std::vector<std::string> command = {TESSERA_TEST_PYTHON};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return run_program(command);
}

TEST(Transformers, LoadsWhatIsMerged) {
  if (python({"-c", "import transformers"}).status != 0) GTEST_SKIP() << "build/python has no package transformers";
  const Folder folder;
  const auto written = python({TESSERA_ROOT "/tests/python/transformers_files.py", "write", folder.path()});
  ASSERT_EQ(written.status, 0) << written.output;
  const auto merged = [&](const std::string& from, const std::string& name, const checkpoint::MergeOptions& options) {
    checkpoint::merge(folder / from, folder / ("merged-" + name), options);
    std::filesystem::copy_file(folder / "config/config.json", folder / ("merged-" + name) / "config.json");
  };
  merged("dcp", "dcp", {.max_shard_size = 5000});
  merged("file.pt", "file", {});
  merged("file.pt", "bin", {.unsafe_serialization = true});
  const auto read = python({TESSERA_ROOT "/tests/python/transformers_files.py", "read", folder.path()});
  EXPECT_EQ(read.status, 0) << read.output;
}

}  // namespace
}  // namespace tessera::testing::transformers_test
