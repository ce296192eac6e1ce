#include "tessera/checkpoint/formats/gguf/block_code.h"

#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
#include <utility>

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

/// Decodes codes of four bits (Q4_0, Q4_1) or five bits (Q5_0, Q5_1). Q4_1 and Q5_1 also have a least value. The lower halves of the bytes
/// are the first 16 values, the upper halves the other 16 values. The fifth bit of a value is stored apart from the other four.
template <bool kFive, bool kLeast>
void decode_small(const uint8_t* block, float* values) {
  const float scale = half_at(block), least = kLeast ? half_at(block + 2) : 0;
  const auto* const fifth = block + (kLeast ? 4 : 2);
  const auto* const halves = fifth + (kFive ? 4 : 0);
  const auto value = [&](int code, int i) {
    if constexpr (kFive) code |= ((fifth[i / 8] >> (i % 8)) & 1) << 4;
    if constexpr (kLeast) return scale * static_cast<float>(code) + least;
    return scale * static_cast<float>(code - (kFive ? 16 : 8));
  };
  for (int i = 0; i < kSmall / 2; i++) {
    values[i] = value(halves[i] & 0xF, i);
    values[i + kSmall / 2] = value(halves[i] >> 4, i + kSmall / 2);
  }
}

/// Encodes each value as the nearest of 16 or 32 codes. The scale maps the value farthest from zero to code 0; values beyond the last code
/// get the last code.
template <bool kFive>
void encode_small(const float* values, uint8_t* block) {
  constexpr float kHalf = kFive ? 16 : 8;
  const float* const most =
      std::max_element(values, values + kSmall, [](float one, float other) { return std::abs(one) < std::abs(other); });
  const float scale = *most / -kHalf, per_value = scale == 0 ? 0 : 1 / scale;
  put_half(block, scale);
  int codes[kSmall];
  for (int i = 0; i < kSmall; i++)
    codes[i] = std::min(static_cast<int>(values[i] * per_value + (kHalf + 0.5F)), static_cast<int>(2 * kHalf) - 1);
  if constexpr (kFive) {
    std::fill_n(block + 2, 4, uint8_t{0});
    for (int i = 0; i < kSmall; i++) block[2 + i / 8] |= static_cast<uint8_t>((codes[i] >> 4) << (i % 8));
  }
  auto* const halves = block + (kFive ? 6 : 2);
  for (int i = 0; i < kSmall / 2; i++) halves[i] = static_cast<uint8_t>((codes[i] & 0xF) | ((codes[i + kSmall / 2] & 0xF) << 4));
}

void decode_q8_0(const uint8_t* block, float* values) {
  const float scale = half_at(block);
  for (int i = 0; i < kSmall; i++) values[i] = static_cast<float>(static_cast<int8_t>(block[2 + i])) * scale;
}

/// Rounds to the nearest code, ties away from zero.
void encode_q8_0(const float* values, uint8_t* block) {
  float most = 0;
  for (int i = 0; i < kSmall; i++) most = std::max(most, std::abs(values[i]));
  const float scale = most / 127, per_value = scale == 0 ? 0 : 1 / scale;
  put_half(block, scale);
  for (int i = 0; i < kSmall; i++) block[2 + i] = static_cast<uint8_t>(static_cast<int8_t>(std::round(values[i] * per_value)));
}

/// Decodes two bits for each value. A block has sixteen parts of 16 values, each with a scale and a least value of four bits.
void decode_q2_k(const uint8_t* block, float* values) {
  const uint8_t *scales = block, *two = block + 16;
  const float scale = half_at(block + 80), least = half_at(block + 82);
  for (int at = 0; at < kLarge; at++) {
    const auto four = scales[at / 16];
    const float s = scale * static_cast<float>(four & 0xF), m = least * static_cast<float>(four >> 4);
    values[at] = s * static_cast<float>((two[at / 128 * 32 + at % 32] >> (at / 32 % 4 * 2)) & 3) - m;
  }
}

/// Decodes three bits for each value. The third bit is stored apart; where it is 0, four is subtracted. A block has sixteen parts of 16
/// values, each with a scale of six bits.
void decode_q3_k(const uint8_t* block, float* values) {
  const uint8_t *third = block, *two = block + 32, *scales = block + 96;
  const float scale = half_at(block + 108);
  for (int at = 0; at < kLarge; at++) {
    const int part = at / 16;
    const int lower = part < 8 ? scales[part] & 0xF : scales[part - 8] >> 4, upper = (scales[8 + part % 4] >> (part / 4 * 2)) & 3;
    const float s = scale * static_cast<float>((lower | (upper << 4)) - 32);
    const int low = (two[at / 128 * 32 + at % 32] >> (at / 32 % 4 * 2)) & 3, high = (third[at % 32] >> (at / 32)) & 1;
    values[at] = s * static_cast<float>(low - 4 * (1 - high));
  }
}

constexpr int kParts = 8;  // of 32 values each, with a scale and a least value of six bits

struct SixBits {
  int scale = 0, least = 0;
};

SixBits six_bits(const uint8_t* six, int part) {
  if (part < 4) return {six[part] & 0x3F, six[4 + part] & 0x3F};
  const auto four = six[4 + part];
  return {(four & 0xF) | ((six[part - 4] >> 2) & 0x30), (four >> 4) | ((six[part] >> 2) & 0x30)};
}

void put_six_bits(uint8_t* six, int part, SixBits bits) {
  if (part < 4) {
    six[part] = static_cast<uint8_t>(bits.scale);
    six[4 + part] = static_cast<uint8_t>(bits.least);
    return;
  }
  six[4 + part] = static_cast<uint8_t>((bits.scale & 0xF) | ((bits.least & 0xF) << 4));
  six[part - 4] |= static_cast<uint8_t>((bits.scale >> 4) << 6);
  six[part] |= static_cast<uint8_t>((bits.least >> 4) << 6);
}

/// Decodes four bits for each value, or five bits, of which the fifth is stored apart.
template <bool kFive>
void decode_k(const uint8_t* block, float* values) {
  const float scale = half_at(block), least = half_at(block + 2);
  const auto* const fifth = block + 16;
  for (int part = 0; part < kParts; part++) {
    const auto six = six_bits(block + 4, part);
    const float s = scale * static_cast<float>(six.scale), m = least * static_cast<float>(six.least);
    const auto* from = block + (kFive ? 48 : 16) + part / 2 * 32;
    for (int i = 0; i < 32; i++) {
      int code = part % 2 == 0 ? from[i] & 0xF : from[i] >> 4;
      if constexpr (kFive) code |= ((fifth[i] >> part) & 1) << 4;
      values[part * 32 + i] = s * static_cast<float>(code) - m;
    }
  }
}

/// The scale and the least value of 32 values: a value is scale * code - least. fit_of() searches as llama.cpp does for the smallest
/// weighted squared error.
struct Fit {
  float scale = 0, least = 0;
};

Fit fit_of(const float* values, int most) {
  constexpr int kTrials = 20;
  float squares = 0, weights[32], sum_w = 0, sum_x = 0;
  for (int i = 0; i < 32; i++) squares += values[i] * values[i];
  for (int i = 0; i < 32; i++) weights[i] = std::sqrt(squares / 32) + std::abs(values[i]);
  for (int i = 0; i < 32; i++) sum_w += weights[i], sum_x += weights[i] * values[i];
  const auto [low, high] = std::minmax_element(values, values + 32);
  const float lowest = std::min(*low, 0.0F), range = *high - lowest;
  if (!(range > 0)) return {0, -lowest};
  const auto code_of = [&](float x, float per_value) {
    return std::clamp(static_cast<float>(std::nearbyint(per_value * (x - lowest))), 0.0F, static_cast<float>(most));
  };
  Fit best{range / static_cast<float>(most), -lowest};
  float least_error = 0;
  const auto error_of = [&](Fit fit, float per_value) {
    float error = 0;
    for (int i = 0; i < 32; i++) {
      const float difference = fit.scale * code_of(values[i], per_value) - fit.least - values[i];
      error += weights[i] * difference * difference;
    }
    return error;
  };
  least_error = error_of(best, static_cast<float>(most) / range);
  for (int trial = 0; trial <= kTrials; trial++) {
    const float per_value = (-1 + 0.1F * static_cast<float>(trial) + static_cast<float>(most)) / range;
    float sum_l = 0, sum_l2 = 0, sum_xl = 0;
    for (int i = 0; i < 32; i++) {
      const float code = code_of(values[i], per_value);
      sum_l += weights[i] * code;
      sum_l2 += weights[i] * code * code;
      sum_xl += weights[i] * code * values[i];
    }
    const float determinant = sum_w * sum_l2 - sum_l * sum_l;
    if (!(determinant > 0)) continue;
    Fit fit{(sum_w * sum_xl - sum_x * sum_l) / determinant, -(sum_l2 * sum_x - sum_l * sum_xl) / determinant};
    if (fit.least < 0) fit = {sum_xl / sum_l2, 0};
    if (const float error = error_of(fit, per_value); error < least_error) least_error = error, best = fit;
  }
  return best;
}

void encode_q4_k(const float* values, uint8_t* block) {
  constexpr int kMostOfSix = 63, kMost = 15;
  Fit fits[kParts], largest;
  for (int part = 0; part < kParts; part++) {
    fits[part] = fit_of(values + part * 32, kMost);
    largest = {std::max(largest.scale, fits[part].scale), std::max(largest.least, fits[part].least)};
  }
  std::fill_n(block, 144, uint8_t{0});
  put_half(block, largest.scale / kMostOfSix);
  put_half(block + 2, largest.least / kMostOfSix);
  const auto share = [&](float of, float all) {
    return all > 0 ? std::clamp(static_cast<int>(std::nearbyint(kMostOfSix / all * of)), 0, kMostOfSix) : 0;
  };
  const float scale = half_at(block), least = half_at(block + 2);
  for (int part = 0; part < kParts; part++) {
    const SixBits six{share(fits[part].scale, largest.scale), share(fits[part].least, largest.least)};
    put_six_bits(block + 4, part, six);
    const float s = scale * static_cast<float>(six.scale), m = least * static_cast<float>(six.least);
    auto* to = block + 16 + part / 2 * 32;
    for (int i = 0; i < 32 && s != 0; i++) {
      const auto code = static_cast<int>(std::clamp(std::nearbyint((values[part * 32 + i] + m) / s), 0.0F, static_cast<float>(kMost)));
      to[i] |= static_cast<uint8_t>(part % 2 == 0 ? code : code << 4);
    }
  }
}

/// The values of the sixteen codes of four bits, which are closer to each other near zero.
constexpr int8_t kUneven[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

void decode_uneven(const uint8_t* halves, float scale, float* values) {
  for (int i = 0; i < kSmall / 2; i++) {
    values[i] = scale * static_cast<float>(kUneven[halves[i] & 0xF]);
    values[i + kSmall / 2] = scale * static_cast<float>(kUneven[halves[i] >> 4]);
  }
}

void decode_iq4_nl(const uint8_t* block, float* values) {
  decode_uneven(block + 2, half_at(block), values);
}

void decode_iq4_xs(const uint8_t* block, float* values) {
  const float scale = half_at(block);
  for (int part = 0; part < kParts; part++) {
    const int lower = (block[4 + part / 2] >> (part % 2 * 4)) & 0xF, upper = (block[2 + part / 4] >> (part % 4 * 2)) & 3;
    decode_uneven(block + 8 + part * 16, scale * static_cast<float>((lower | (upper << 4)) - 32), values + part * 32);
  }
}

/// Decodes six bits for each value: four in one place, two in another. Each part of 16 values has a scale.
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

/// Rounds to the nearest, ties to even.
void encode_bf16(const float* values, uint8_t* block) {
  const auto bits = std::bit_cast<uint32_t>(*values);
  const auto rounded = static_cast<uint16_t>(*values == *values ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : (bits >> 16) | 64);
  std::memcpy(block, &rounded, sizeof rounded);
}

constexpr std::array kCodes = {
    BlockCode{"F32", 0, 1, 4, decode_f32, encode_f32, 0},
    BlockCode{"F16", 1, 1, 2, decode_f16, encode_f16, 1},
    BlockCode{"Q4_0", 2, kSmall, 18, decode_small<false, false>, encode_small<false>, 2},
    BlockCode{"Q4_1", 3, kSmall, 20, decode_small<false, true>},
    BlockCode{"Q5_0", 6, kSmall, 22, decode_small<true, false>, encode_small<true>, 8},
    BlockCode{"Q5_1", 7, kSmall, 24, decode_small<true, true>},
    BlockCode{"Q8_0", 8, kSmall, 34, decode_q8_0, encode_q8_0, 7},
    BlockCode{"Q2_K", 10, kLarge, 84, decode_q2_k},
    BlockCode{"Q3_K", 11, kLarge, 110, decode_q3_k},
    BlockCode{"Q4_K", 12, kLarge, 144, decode_k<false>, encode_q4_k, 14},
    BlockCode{"Q5_K", 13, kLarge, 176, decode_k<true>},
    BlockCode{"Q6_K", 14, kLarge, 210, decode_q6_k},
    BlockCode{"IQ4_NL", 20, kSmall, 18, decode_iq4_nl},
    BlockCode{"IQ4_XS", 23, kLarge, 136, decode_iq4_xs},
    BlockCode{"BF16", 30, 1, 2, decode_bf16, encode_bf16, 32},
};

/// Codes of ggml that Tessera does not read.
constexpr std::pair<uint32_t, std::string_view> kOthers[] = {
    {9, "Q8_1"},   {15, "Q8_K"},  {16, "IQ2_XXS"}, {17, "IQ2_XS"}, {18, "IQ3_XXS"}, {19, "IQ1_S"}, {21, "IQ3_S"},
    {22, "IQ2_S"}, {24, "I8"},    {25, "I16"},     {26, "I32"},    {27, "I64"},     {28, "F64"},   {29, "IQ1_M"},
    {34, "TQ1_0"}, {35, "TQ2_0"}, {39, "MXFP4"},   {40, "NVFP4"},  {41, "Q1_0"},
};

const BlockCode* find(const auto& value, auto member) {
  const auto* const found = std::ranges::find(kCodes, value, member);
  return found == kCodes.end() ? nullptr : found;
}

}  // namespace

std::span<const BlockCode> block_codes() {
  return kCodes;
}

std::string_view name_of_block_code(uint32_t number) {
  if (const auto* code = find_block_code(number)) return code->name;
  const auto* const other = std::ranges::find(kOthers, number, [](const auto& each) { return each.first; });
  return other == std::end(kOthers) ? std::string_view() : other->second;
}

const BlockCode* find_block_code(uint32_t number) {
  return find(number, &BlockCode::number);
}
const BlockCode* find_block_code(std::string_view name) {
  return find(name, &BlockCode::name);
}

}  // namespace tessera::checkpoint
