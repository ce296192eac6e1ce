#include "tessera/checkpoint/formats/block_code.h"

#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

namespace tessera::checkpoint {
namespace {

constexpr int kSmall = 32, kLarge = 256;  // values in a block

float half_at(const uint8_t* bytes) {
  uint16_t bits = 0;
  std::memcpy(&bits, bytes, sizeof bits);
  return static_cast<float>(c10::Half(bits, c10::Half::from_bits()));
}

void put_half(uint8_t* bytes, float value) {
  const auto bits = c10::Half(value).x;
  std::memcpy(bytes, &bits, sizeof bits);
}

/// The lower halves of bytes are the first values, the upper halves those after them.
void decode_q4_0(const uint8_t* block, float* values) {
  const float scale = half_at(block);
  for (int i = 0; i < kSmall / 2; i++) {
    values[i] = scale * static_cast<float>((block[2 + i] & 0xF) - 8);
    values[i + kSmall / 2] = scale * static_cast<float>((block[2 + i] >> 4) - 8);
  }
}

void decode_q4_1(const uint8_t* block, float* values) {
  const float scale = half_at(block), least = half_at(block + 2);
  for (int i = 0; i < kSmall / 2; i++) {
    values[i] = scale * static_cast<float>(block[4 + i] & 0xF) + least;
    values[i + kSmall / 2] = scale * static_cast<float>(block[4 + i] >> 4) + least;
  }
}

void decode_q8_0(const uint8_t* block, float* values) {
  const float scale = half_at(block);
  for (int i = 0; i < kSmall; i++) values[i] = static_cast<float>(static_cast<int8_t>(block[2 + i])) * scale;
}

/// Halves are rounded away from zero.
void encode_q8_0(const float* values, uint8_t* block) {
  float most = 0;
  for (int i = 0; i < kSmall; i++) most = std::max(most, std::abs(values[i]));
  const float scale = most / 127, per_value = scale == 0 ? 0 : 1 / scale;
  put_half(block, scale);
  for (int i = 0; i < kSmall; i++) block[2 + i] = static_cast<uint8_t>(static_cast<int8_t>(std::round(values[i] * per_value)));
}

/// Eight parts of 32 values, each with a scale and a least value of six bits.
void decode_q4_k(const uint8_t* block, float* values) {
  const float scale = half_at(block), least = half_at(block + 2);
  const uint8_t *six = block + 4, *halves = block + 16;
  for (int part = 0; part < 8; part++) {
    const auto upper = [&](int at) { return (six[8 + part - 4] >> at) & 0xF; };
    const int of_scale = part < 4 ? six[part] & 0x3F : upper(0) | ((six[part - 4] >> 2) & 0x30);
    const int of_least = part < 4 ? six[4 + part] & 0x3F : upper(4) | ((six[part] >> 2) & 0x30);
    const float s = scale * static_cast<float>(of_scale), m = least * static_cast<float>(of_least);
    const auto* from = halves + part / 2 * 32;
    for (int i = 0; i < 32; i++) values[part * 32 + i] = s * static_cast<float>(part % 2 == 0 ? from[i] & 0xF : from[i] >> 4) - m;
  }
}

/// Six bits a value: four in one place, two in another. A scale for 16 values.
void decode_q6_k(const uint8_t* block, float* values) {
  const auto *low = block, *high = block + 128, *scales = block + 192;
  const float scale = half_at(block + 208);
  for (int part = 0; part < 8; part++) {
    const auto *four = low + part / 4 * 64 + part % 2 * 32, *two = high + part / 4 * 32;
    for (int i = 0; i < 32; i++) {
      const int lower = part % 4 < 2 ? four[i] & 0xF : four[i] >> 4, upper = (two[i] >> (2 * (part % 4))) & 3, at = part * 32 + i;
      const float s = scale * static_cast<float>(static_cast<int8_t>(scales[at / 16]));
      values[at] = s * static_cast<float>((lower | (upper << 4)) - 32);
    }
  }
}

void decode_f32(const uint8_t* block, float* values) {
  std::memcpy(values, block, sizeof(float));
}
void encode_f32(const float* values, uint8_t* block) {
  std::memcpy(block, values, sizeof(float));
}
void decode_f16(const uint8_t* block, float* values) {
  *values = half_at(block);
}
void encode_f16(const float* values, uint8_t* block) {
  put_half(block, *values);
}

void decode_bf16(const uint8_t* block, float* values) {
  uint16_t bits = 0;
  std::memcpy(&bits, block, sizeof bits);
  *values = std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

/// To the nearest, ties to even.
void encode_bf16(const float* values, uint8_t* block) {
  const auto bits = std::bit_cast<uint32_t>(*values);
  const auto rounded = static_cast<uint16_t>(*values == *values ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : (bits >> 16) | 64);
  std::memcpy(block, &rounded, sizeof rounded);
}

constexpr std::array kCodes = {
    BlockCode{"F32", 0, 1, 4, decode_f32, encode_f32},
    BlockCode{"F16", 1, 1, 2, decode_f16, encode_f16},
    BlockCode{"Q4_0", 2, kSmall, 18, decode_q4_0},
    BlockCode{"Q4_1", 3, kSmall, 20, decode_q4_1},
    BlockCode{"Q8_0", 8, kSmall, 34, decode_q8_0, encode_q8_0},
    BlockCode{"Q4_K", 12, kLarge, 144, decode_q4_k},
    BlockCode{"Q6_K", 14, kLarge, 210, decode_q6_k},
    BlockCode{"BF16", 30, 1, 2, decode_bf16, encode_bf16},
};

const BlockCode* find(const auto& value, auto member) {
  const auto* const found = std::ranges::find(kCodes, value, member);
  return found == kCodes.end() ? nullptr : found;
}

}  // namespace

std::span<const BlockCode> block_codes() {
  return kCodes;
}

const BlockCode* find_block_code(uint32_t number) {
  return find(number, &BlockCode::number);
}
const BlockCode* find_block_code(std::string_view name) {
  return find(name, &BlockCode::name);
}

}  // namespace tessera::checkpoint
