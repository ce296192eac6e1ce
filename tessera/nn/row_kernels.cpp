#include "tessera/nn/row_kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "tessera/base/kernel.h"

namespace tessera::nn {

const std::array<float, 16> kNf4 = {-1.0F,
                                    -0.6961928009986877F,
                                    -0.5250730514526367F,
                                    -0.39491748809814453F,
                                    -0.28444138169288635F,
                                    -0.18477343022823334F,
                                    -0.09105003625154495F,
                                    0.0F,
                                    0.07958029955625534F,
                                    0.16093020141124725F,
                                    0.24611230194568634F,
                                    0.33791524171829224F,
                                    0.44070982933044434F,
                                    0.5626170039176941F,
                                    0.7229568362236023F,
                                    1.0F};

namespace {

// All kernels compute in float32, whatever the stored dtype.

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

constexpr int64_t kLanes = 16;  // partial sums: a fixed number, so that sums have the same bits on every processor

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

template <class T>
[[gnu::always_inline]] inline void forward_rows(const NormForward<T>& norm, int64_t begin, int64_t end) {
  const auto size = norm.size;
  const float* const weight = norm.weight;
  for (auto row = begin; row < end; row++) {
    const T* const x = norm.x + row * size;
    T* const y = norm.y + row * size;
    const float squares = sum_of(size, [&](int64_t i) __attribute__((always_inline)) { return to_float(x[i]) * to_float(x[i]); });
    const float r = 1 / std::sqrt(squares / static_cast<float>(size) + norm.eps);
    norm.r[row] = r;
#pragma GCC ivdep
    for (int64_t i = 0; i < size; i++) store(y[i], to_float(x[i]) * r * weight[i]);
  }
}

template <class T>
[[gnu::always_inline]] inline void backward_rows(const NormBackward<T>& norm, int64_t begin, int64_t end, float* const sums) {
  const auto size = norm.size;
  const float* const weight = norm.weight;
  for (auto row = begin; row < end; row++) {
    const T* const x = norm.x + row * size;
    const T* const grad = norm.grad + row * size;
    T* const grad_x = norm.grad_x + row * size;
    const float r = norm.r[row];
    const float along =
        sum_of(size, [&](int64_t i) __attribute__((always_inline)) { return to_float(grad[i]) * weight[i] * to_float(x[i]); });
    const float common = along * r * r / static_cast<float>(size);
#pragma GCC ivdep
    for (int64_t i = 0; i < size; i++) {
      const float g = to_float(grad[i]), value = to_float(x[i]);
      sums[i] += g * value * r;
      store(grad_x[i], r * (g * weight[i] - value * common));
    }
  }
}

template <class T>
[[gnu::always_inline]] inline void turn(const Rotation<T>& r, int64_t begin, int64_t end) {
  for (auto token = begin; token < end; token++) {
    const auto batch = token / r.length, at = token % r.length;
    const float* const cos = r.cos + batch * r.batch_of_table + at * r.pairs;
    const float* const sin = r.sin + batch * r.batch_of_table + at * r.pairs;
    for (int64_t head = 0; head < r.heads; head++) {
      const T* const from = r.from.values + batch * r.from.batch + at * r.from.length + head * r.from.head;
      T* const to = r.to.values + batch * r.to.batch + at * r.to.length + head * r.to.head;
#pragma GCC ivdep
      for (int64_t i = 0; i < r.pairs; i++) {
        const float first = to_float(from[i]), second = to_float(from[i + r.pairs]), s = r.direction * sin[i];
        store(to[i], first * cos[i] - second * s);
        store(to[i + r.pairs], second * cos[i] + first * s);
      }
      for (auto i = 2 * r.pairs; i < r.size; i++) to[i] = from[i];
    }
  }
}

/// The two values of NF4 that each byte encodes.
struct Pairs {
  Pairs() {
    for (size_t byte = 0; byte < 256; byte++) {
      values[byte][0] = kNf4[byte >> 4];
      values[byte][1] = kNf4[byte & 15];
    }
  }
  float values[256][2];
};

template <class Out>
[[gnu::always_inline]] inline void nf4_blocks(const uint8_t* codes, const float* scales, int64_t count, Out* values) {
  static const Pairs pairs;
  float block[kQuantBlock];
  for (int64_t done = 0; done < count; done += kQuantBlock, codes += kQuantBlock / 2, scales++) {
    const auto here = std::min(kQuantBlock, count - done);
    for (int64_t i = 0; i < (here + 1) / 2; i++) {
      block[2 * i] = pairs.values[codes[i]][0];
      block[2 * i + 1] = pairs.values[codes[i]][1];
    }
    const float scale = *scales;
    for (int64_t i = 0; i < here; i++) store(values[done + i], block[i] * scale);
  }
}

template <class Out>
[[gnu::always_inline]] inline void byte_blocks(const uint8_t* codes, const float* of_code, const float* scales, int64_t count, Out* values) {
  for (int64_t done = 0; done < count; done += kQuantBlock, scales++) {
    const auto end = std::min(done + kQuantBlock, count);
    const float scale = *scales;
    for (int64_t i = done; i < end; i++) store(values[i], of_code[codes[i]] * scale);
  }
}

}  // namespace

TESSERA_KERNEL void run(const NormForward<float>& norm, int64_t begin, int64_t end) {
  forward_rows(norm, begin, end);
}
TESSERA_KERNEL void run(const NormForward<uint16_t>& norm, int64_t begin, int64_t end) {
  forward_rows(norm, begin, end);
}
TESSERA_KERNEL void run(const NormBackward<float>& norm, int64_t begin, int64_t end, float* sums) {
  backward_rows(norm, begin, end, sums);
}
TESSERA_KERNEL void run(const NormBackward<uint16_t>& norm, int64_t begin, int64_t end, float* sums) {
  backward_rows(norm, begin, end, sums);
}

TESSERA_KERNEL void run(const Rotation<float>& rotation, int64_t begin, int64_t end) {
  turn(rotation, begin, end);
}
TESSERA_KERNEL void run(const Rotation<uint16_t>& rotation, int64_t begin, int64_t end) {
  turn(rotation, begin, end);
}

TESSERA_KERNEL float largest(const float* values, int64_t count) {
  float most = 0;
  for (int64_t i = 0; i < count; i++) most = std::max(most, std::abs(values[i]));
  return most;
}

TESSERA_KERNEL void nf4_codes(const float* values, int64_t count, float scale, uint8_t* codes) {
  // Divides by the scale only in an incomplete block, as bitsandbytes does; elsewhere, multiplies by its inverse.
  const bool divides = count < kQuantBlock;
  const float factor = scale == 0 ? 0 : 1 / scale;
  int32_t found[kQuantBlock] = {};
  float shares[kQuantBlock] = {};
  for (int64_t i = 0; i < count; i++) shares[i] = divides && scale != 0 ? values[i] / scale : values[i] * factor;
  for (size_t k = 0; k + 1 < kNf4.size(); k++) {
    const float middle = (kNf4[k] + kNf4[k + 1]) / 2;
    for (int64_t i = 0; i < kQuantBlock; i++) found[i] += shares[i] > middle ? 1 : 0;
  }
  for (int64_t i = 0; i < (count + 1) / 2; i++) codes[i] = static_cast<uint8_t>(found[2 * i] << 4 | found[2 * i + 1]);
}

TESSERA_KERNEL void nf4_values(const uint8_t* codes, const float* scales, int64_t count, float* values) {
  nf4_blocks(codes, scales, count, values);
}
TESSERA_KERNEL void nf4_values(const uint8_t* codes, const float* scales, int64_t count, uint16_t* bfloats) {
  nf4_blocks(codes, scales, count, bfloats);
}
TESSERA_KERNEL void byte_values(const uint8_t* codes, const float* of_code, const float* scales, int64_t count, float* values) {
  byte_blocks(codes, of_code, scales, count, values);
}
TESSERA_KERNEL void byte_values(const uint8_t* codes, const float* of_code, const float* scales, int64_t count, uint16_t* bfloats) {
  byte_blocks(codes, of_code, scales, count, bfloats);
}

}  // namespace tessera::nn
