// The constants were computed on x86-64; every processor and compiler must reach them.
#include "tessera/nn/row_kernels.h"

#include <gtest/gtest.h>

#include <bit>

#include "tests/testing/bits.h"

namespace tessera::nn::row_kernels_test {
namespace {

using testing::BitHash;
using testing::fixed_bfloats;
using testing::fixed_bytes;
using testing::fixed_floats;

constexpr int64_t kRows = 5, kSize = 203;  // which fills no vector

template <class T, class Fixed>
uint64_t norm_bits(const Fixed& fixed) {
  const std::vector<T> x = fixed(kRows * kSize, 1), drawn = fixed(kSize, 2), grad = fixed(kRows * kSize, 3);
  std::vector<float> weight(kSize);
  for (size_t i = 0; i < weight.size(); i++)
    weight[i] = std::is_same_v<T, float> ? static_cast<float>(drawn[i]) : std::bit_cast<float>(static_cast<uint32_t>(drawn[i]) << 16);
  std::vector<T> y(kRows * kSize), grad_x(kRows * kSize);
  std::vector<float> r(kRows), sums(kSize);
  run(NormForward<T>{.x = x.data(), .weight = weight.data(), .y = y.data(), .r = r.data(), .size = kSize, .eps = 1e-5F}, 0, kRows);
  run(NormBackward<T>{.grad = grad.data(), .x = x.data(), .weight = weight.data(), .r = r.data(), .grad_x = grad_x.data(), .size = kSize}, 0,
      kRows, sums.data());
  return BitHash().add(y).add(r).add(grad_x).add(sums).value();
}

template <class T, class Fixed>
uint64_t rotation_bits(const Fixed& fixed) {
  constexpr int64_t kHeads = 3, kPairs = 23, kHead = 2 * kPairs + 1;
  const std::vector<T> from = fixed(kRows * kHeads * kHead, 1);
  std::vector<T> to(from.size());
  const auto cos = fixed_floats(kRows * kPairs, 2), sin = fixed_floats(kRows * kPairs, 3);
  run(Rotation<T>{.from = {.values = from.data(), .batch = kRows * kHeads * kHead, .length = kHeads * kHead, .head = kHead},
                  .to = {.values = to.data(), .batch = kRows * kHeads * kHead, .length = kHeads * kHead, .head = kHead},
                  .cos = cos.data(), .sin = sin.data(), .batch_of_table = 0, .length = kRows, .heads = kHeads, .size = kHead,
                  .pairs = kPairs, .direction = -1},
      0, kRows);
  return BitHash().add(to).value();
}

TEST(RowKernels, GiveTheSameBitsOnEveryProcessor) {
  EXPECT_EQ(norm_bits<float>(fixed_floats), 0x4ff74c061120bc04ULL);
  EXPECT_EQ(norm_bits<uint16_t>(fixed_bfloats), 0x637b381a08ed7a11ULL);
  EXPECT_EQ(rotation_bits<float>(fixed_floats), 0x61ef8f83d2c0c416ULL);
  EXPECT_EQ(rotation_bits<uint16_t>(fixed_bfloats), 0x985e7a5154738cf0ULL);

  const auto values = fixed_floats(kQuantBlock, 1);
  std::vector<uint8_t> codes(kQuantBlock / 2), of_some(19);
  nf4_codes(values.data(), kQuantBlock, largest(values.data(), kQuantBlock), codes.data());
  nf4_codes(values.data(), 37, largest(values.data(), 37), of_some.data());
  EXPECT_EQ(BitHash().add(codes).add(of_some).value(), 0x4b03a38096f8f0d1ULL);
  const auto bytes = fixed_bytes(1000, 5);
  const auto scales = fixed_floats(16, 6), of_code = fixed_floats(256, 7);
  std::vector<float> floats(1000), of_bytes(1000);
  std::vector<uint16_t> bfloats(1000), bfloats_of_bytes(1000);
  nf4_values(bytes.data(), scales.data(), 1000, floats.data());
  nf4_values(bytes.data(), scales.data(), 1000, bfloats.data());
  byte_values(bytes.data(), of_code.data(), scales.data(), 1000, of_bytes.data());
  byte_values(bytes.data(), of_code.data(), scales.data(), 1000, bfloats_of_bytes.data());
  EXPECT_EQ(BitHash().add(floats).add(bfloats).add(of_bytes).add(bfloats_of_bytes).value(), 0x2809a89efd23164cULL);
}

}  // namespace
}  // namespace tessera::nn::row_kernels_test
