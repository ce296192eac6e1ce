// The constants were computed on x86-64; every processor and compiler must reach them.
#include "tessera/vision/transform_kernels.h"

#include <gtest/gtest.h>

#include "tests/testing/bits.h"

namespace tessera::vision::transform_kernels_test {
namespace {

using testing::BitHash;
using testing::fixed_bytes;

TEST(TransformKernels, GiveTheSameBitsOnEveryProcessor) {
  constexpr int64_t kHeight = 21, kWidth = 77;
  const auto bytes = fixed_bytes(3 * kHeight * kWidth, 1);
  const Pixels pixels = {.first = bytes.data(), .row = 3 * kWidth, .height = kHeight, .width = kWidth};
  const auto bits_of = [&](const auto& transform) {
    std::vector<uint8_t> to(bytes.size());
    transform(to.data());
    return BitHash().add(to).value();
  };
  EXPECT_EQ(sum_of_greys(pixels), 204'576);
  EXPECT_EQ(bits_of([&](uint8_t* to) { mix_with_grey(pixels, 0.6F, 0.4F, to); }), 0xf7271a05811d229cULL);
  EXPECT_EQ(bits_of([&](uint8_t* to) { turn_hue(pixels, 0.13F, to); }), 0x4a19280aa186432fULL);
  EXPECT_EQ(bits_of([&](uint8_t* to) { mix_with_blur(pixels, 0.3F, to); }), 0x9532df21998a351dULL);
  EXPECT_EQ(bits_of([&](uint8_t* to) { take_nearest(pixels, {.x = {0.9F, 0.1F, 0.02F}, .y = {-0.1F, 0.9F, 0.01F}}, to); }), 0x603a307c22352e52ULL);
  const ChannelScale scale = {.mean = {0.485F, 0.456F, 0.406F}, .deviation = {0.229F, 0.224F, 0.225F}};
  std::vector<float> planes(bytes.size()), packed(bytes.size());
  scale_bytes(pixels, scale, {.first = planes.data(), .channel = kHeight * kWidth, .row = kWidth, .column = 1});
  scale_bytes(pixels, scale, {.first = packed.data(), .channel = 1, .row = 3 * kWidth, .column = 3});
  EXPECT_EQ(BitHash().add(planes).add(packed).value(), 0x5cbab1691bcb24ddULL);
}

}  // namespace
}  // namespace tessera::vision::transform_kernels_test
