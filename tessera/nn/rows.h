// Values of rows as kernels compute with them: in float32, whatever they are stored as.
#pragma once

#include <bit>
#include <cstdint>

namespace tessera::nn {

[[gnu::always_inline]] inline float to_float(float value) {
  return value;
}
[[gnu::always_inline]] inline float to_float(uint16_t bfloat) {
  return std::bit_cast<float>(static_cast<uint32_t>(bfloat) << 16);
}

[[gnu::always_inline]] inline void store(float& to, float value) {
  to = value;
}
/// Rounds to the nearest bfloat16, ties to even. NaN stays NaN.
[[gnu::always_inline]] inline void store(uint16_t& to, float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to = static_cast<uint16_t>(value == value ? rounded : 0x7fc0);
}

constexpr int64_t kLanes = 16;  // sums that run side by side, so that they have the same bits on every processor

/// The sum of value(0), ..., value(count - 1).
template <class Value>
[[gnu::always_inline]] inline float sum_of(int64_t count, const Value& value) {
  float sums[kLanes] = {};
  const auto whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; lane++) sums[lane] += value(i + lane);
  }
  for (auto i = whole; i < count; i++) sums[i - whole] += value(i);
  for (auto half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];
  }
  return sums[0];
}

}  // namespace tessera::nn
