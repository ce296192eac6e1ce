// The loops of quantize_forms.cpp.
#pragma once

#include <array>
#include <cstdint>

namespace tessera::nn {

constexpr int64_t kQuantBlock = 64;  // values that have one scale

/// The 16 values of NF4.
extern const std::array<float, 16> kNf4;

/// The largest absolute value.
float largest(const float* values, int64_t count);
/// Encodes one block: two codes a byte, the first one in the high half.
void nf4_codes(const float* values, int64_t count, float scale, uint8_t* codes);
/// Decodes blocks of 64 with these scales. `count` may end within a block.
void nf4_values(const uint8_t* codes, const float* scales, int64_t count, float* values);
void nf4_values(const uint8_t* codes, const float* scales, int64_t count, uint16_t* bfloats);
/// Decodes blocks of 64 values with one byte each, which stands for one of the 256 values `of_code`.
void byte_values(const uint8_t* codes, const float* of_code, const float* scales, int64_t count, float* values);
void byte_values(const uint8_t* codes, const float* of_code, const float* scales, int64_t count, uint16_t* bfloats);

}  // namespace tessera::nn
