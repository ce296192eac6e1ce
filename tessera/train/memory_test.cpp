#include "tessera/train/memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

namespace tessera::train::memory_test {
namespace {

TEST(Memory, IsWhatThisProcessHas) {
  constexpr size_t kBytes = 64 << 20;
  const double before = memory().value;
  // The sanitizer for addresses keeps what `delete` frees.
  void* much = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  ASSERT_NE(much, MAP_FAILED);
  EXPECT_GT(memory().value, before + 0.9 * kBytes);
  ::munmap(much, kBytes);
  EXPECT_LT(memory().value, before + 0.5 * kBytes);
  EXPECT_GT(peak_memory().value, before + 0.9 * kBytes);
  EXPECT_EQ(memory().name, "memory");
  EXPECT_EQ(peak_memory().unit, Unit::Bytes);
}

}  // namespace
}  // namespace tessera::train::memory_test
