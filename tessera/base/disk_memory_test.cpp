#include "tessera/base/disk_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <span>
#include <vector>

#include "tessera/base/error.h"
#include "tests/testing/folder.h"
#include "tests/testing/transports.h"

namespace tessera::testing::disk_memory_test {
namespace {

using ::testing::HasSubstr;

/// A line of this process's /proc/self/status, in kB.
size_t resident(const std::string& kind) {
  std::ifstream lines("/proc/self/status");
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(kind + ":")) return std::stoul(line.substr(kind.size() + 1));
  }
  return 0;
}

TEST(DiskMemory, KeepsItsValuesWithoutPages) {
  constexpr size_t kBytes = 64U << 20;
  const auto memory = allocate_on_disk(kBytes, {.folder = folder_on_disk()}, "numbers");
  const auto bytes = std::span(static_cast<unsigned char*>(memory.get()), kBytes);
  EXPECT_TRUE(std::ranges::all_of(bytes.first(100'000), [](unsigned char byte) { return byte == 0; }));
  const auto before = resident("RssFile") + resident("RssShmem");
  for (size_t i = 0; i < kBytes; i += 1000) bytes[i] = static_cast<unsigned char>(i / 1000);
  EXPECT_GT(resident("RssFile") + resident("RssShmem"), before + 50'000);
  evict_pages(bytes.data(), kBytes);
  EXPECT_LT(resident("RssFile") + resident("RssShmem"), before + 10'000);
  read_pages_ahead(bytes.data() + 100, kBytes - 200);
  for (size_t i = 0; i < kBytes; i += 1000) ASSERT_EQ(bytes[i], static_cast<unsigned char>(i / 1000));
}

TEST(DiskMemory, KeepsAFractionOnDisk) {
  constexpr size_t kBytes = 1'000'003;
  for (const double fraction : {0.0, 0.25, 1.0}) {
    const auto memory = allocate_on_disk(kBytes, {.folder = folder_on_disk(), .fraction = fraction}, "numbers");
    std::memset(memory.get(), 7, kBytes);
    evict_pages(memory.get(), kBytes);
    const auto bytes = std::span(static_cast<const unsigned char*>(memory.get()), kBytes);
    EXPECT_TRUE(std::ranges::all_of(bytes, [](unsigned char byte) { return byte == 7; })) << fraction;
  }
}

TEST(DiskMemory, LeavesOtherMemoryAlone) {
  std::vector<char> ordinary(1U << 20, 'x');
  const auto memory = allocate_on_disk(1U << 20, {.folder = folder_on_disk()}, "numbers");
  evict_pages(ordinary.data(), ordinary.size());
  evict_pages(nullptr, 0);
  EXPECT_EQ(std::ranges::count(ordinary, 'x'), std::ssize(ordinary));
}

TEST(DiskMemory, RefusesWhatIsNoPlaceForFiles) {
  const Folder folder;
  EXPECT_THAT(message_of<ConfigError>([&] { expect_sensible({.folder = folder / "nowhere"}); }), HasSubstr("nowhere"));
  EXPECT_THAT(message_of<ConfigError>([&] { expect_sensible({.folder = "/dev/shm"}); }), HasSubstr("lies in memory (tmpfs)"));
  EXPECT_THAT(message_of<ConfigError>([&] { expect_sensible({.folder = folder_on_disk(), .fraction = 1.5}); }),
              HasSubstr("between 0 and 1"));
  EXPECT_THAT(message_of<IoError>([&] { allocate_on_disk(size_t{1} << 50, {.folder = folder_on_disk()}, "numbers"); }),
              HasSubstr("can't keep numbers in a file of 1125899906842624 bytes in"));
}

}  // namespace
}  // namespace tessera::testing::disk_memory_test
