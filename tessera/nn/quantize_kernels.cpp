#include "tessera/nn/quantize_kernels.h"

#include <algorithm>
#include <cmath>

#include "tessera/base/kernel.h"
#include "tessera/nn/rows.h"

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

/// The two values of each byte.
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

TESSERA_KERNEL float largest(const float* values, int64_t count) {
  float most = 0;
  for (int64_t i = 0; i < count; i++) most = std::max(most, std::abs(values[i]));
  return most;
}

TESSERA_KERNEL void nf4_codes(const float* values, int64_t count, float scale, uint8_t* codes) {
  // Divides in an incomplete block, as bitsandbytes does.
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
