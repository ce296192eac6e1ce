#include "tessera/train/memory.h"

#include <gtest/gtest.h>

#include <vector>

namespace tessera::train::memory_test {
namespace {

TEST(Memory, IsWhatThisProcessHas) {
  constexpr size_t kBytes = 64 << 20;
  const double before = memory().value;
  {
    const std::vector<char> much(kBytes, 1);
    EXPECT_GT(memory().value + much[kBytes / 2], before + 0.9 * kBytes);
  }
  EXPECT_LT(memory().value, before + 0.5 * kBytes);
  EXPECT_GT(peak_memory().value, before + 0.9 * kBytes);
  EXPECT_EQ(memory().name, "memory");
  EXPECT_EQ(peak_memory().unit, Unit::Bytes);
}

}  // namespace
}  // namespace tessera::train::memory_test
