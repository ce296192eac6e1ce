// The constants were computed on x86-64; every processor and compiler must reach them.
#include "tessera/optim/update_kernels.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/testing/bits.h"

namespace tessera::optim::update_kernels_test {
namespace {

using testing::BitHash;
using testing::fixed_floats;

/// The values that an update changes. Their number is not a multiple of any vector.
struct Arrays {
  static constexpr size_t kCount = 3001;
  std::vector<float> parameters = fixed_floats(kCount, 1), gradients = fixed_floats(kCount, 2), first = fixed_floats(kCount, 3);
  std::vector<float> second = fixed_floats(kCount, 4);
  std::vector<uint16_t> cast_copy = std::vector<uint16_t>(kCount);

  Arrays() {
    for (auto& value : second) value = std::abs(value);  // a mean of squares
  }
  UpdateRange range() {
    return {.parameters = parameters.data(), .gradients = gradients.data(), .first = first.data(), .second = second.data(),
            .cast_copy = cast_copy.data(), .count = static_cast<int64_t>(kCount)};
  }
  uint64_t bits() const { return BitHash().add(parameters).add(first).add(second).add(cast_copy).value(); }
};

template <class Rule>
uint64_t bits_after(const Rule& rule) {
  Arrays arrays;
  update(rule, arrays.range());
  return arrays.bits();
}

constexpr Common kCommon = {.factor = 0.7F, .l2 = 0.01F, .keep = 0.999F};
const AdamRule kAdam = {.common = kCommon, .step = 0.013F, .first = Decay(0.9), .second = Decay(0.999), .correction = 0.21F, .eps = 1e-8F};

TEST(UpdateKernels, GiveTheSameBitsOnEveryProcessor) {
  EXPECT_EQ(bits_after(SgdRule{.common = kCommon, .lr = 0.1F, .momentum = 0.9F, .share = 0.8F, .nesterov = true}), 0x83d3446e5f53905aULL);
  EXPECT_EQ(bits_after(kAdam), 0xa896254cfc5afaf2ULL);
  EXPECT_EQ(bits_after(LionRule{.common = kCommon, .lr = 0.1F, .update = Decay(0.9), .momentum = Decay(0.99)}), 0x32abf601bd5890deULL);
  Arrays adagrad;
  for (auto& value : adagrad.first) value = std::abs(value);  // a sum of squares
  update(AdagradRule{.common = kCommon, .lr = 0.1F, .eps = 1e-10F}, adagrad.range());
  EXPECT_EQ(adagrad.bits(), 0xd5737c2497563455ULL);
  Arrays lamb;
  const LambRule rule = {.adam = kAdam, .first_correction = 0.1F, .decay = 0.01F};
  const auto squares = prepare(rule, lamb.range());
  apply_update(rule, 0.02F, lamb.range());
  const std::vector<double> sums = {squares.parameters, squares.update};
  EXPECT_EQ(BitHash().add(sums).value(), 0x9912d1b0eed8655fULL);
  EXPECT_EQ(lamb.bits(), 0x3ac21aebfc560f99ULL);
}

}  // namespace
}  // namespace tessera::optim::update_kernels_test
