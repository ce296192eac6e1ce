// The loops of quantize_forms.cpp.
#pragma once

#include <array>
#include <cstdint>

namespace tessera::nn {

constexpr int64_t kQuantBlock = 64;  // values that have one scale

/// The 16 values of NF4.
extern const std::array<float, 16> kNf4;

/// The largest size of so many values.
float largest(const float* values, int64_t count);
/// Of one block: two codes a byte, the first one in the high half.
void nf4_codes(const float* values, int64_t count, float scale, uint8_t* codes);
/// Of blocks of 64 with these scales. `count` may end within a block.
void nf4_values(const uint8_t* codes, const float* scales, int64_t count, float* values);
void nf4_values(const uint8_t* codes, const float* scales, int64_t count, uint16_t* bfloats);
/// Of blocks of 64 values with one byte each, which stands for one of 256 values.
void byte_values(const uint8_t* codes, const float* of_code, const float* scales, int64_t count, float* values);
void byte_values(const uint8_t* codes, const float* of_code, const float* scales, int64_t count, uint16_t* bfloats);

}  // namespace tessera::nn
