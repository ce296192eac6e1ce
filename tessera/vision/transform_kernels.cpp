#include "tessera/vision/transform_kernels.h"

#include <algorithm>
#include <cstring>

#include "tessera/base/kernel.h"

namespace tessera::vision {
namespace {

/// Pixels as floats, each channel for itself, so that the compiler vectorizes loops over them.
constexpr int64_t kSpan = 64;
struct Span {
  alignas(64) std::array<float, kSpan> red = {}, green = {}, blue = {};
};

[[gnu::always_inline]] inline void unpack(const uint8_t* from, int64_t count, Span& span) {
  auto *const red = span.red.data(), *const green = span.green.data(), *const blue = span.blue.data();
  for (int64_t i = 0; i < count; i++) {
    red[i] = from[3 * i];
    green[i] = from[3 * i + 1];
    blue[i] = from[3 * i + 2];
  }
}

[[gnu::always_inline]] inline void pack(const Span& span, int64_t count, uint8_t* to) {
  const auto *const red = span.red.data(), *const green = span.green.data(), *const blue = span.blue.data();
  for (int64_t i = 0; i < count; i++) {
    to[3 * i] = to_byte(red[i]);
    to[3 * i + 1] = to_byte(green[i]);
    to[3 * i + 2] = to_byte(blue[i]);
  }
}

/// Calls `loop(span)` for all pixels, and stores the result. After the end of a row, a span has values of another row.
template <class Loop>
[[gnu::always_inline]] inline void change_spans(const Pixels& pixels, uint8_t* to, const Loop& loop) {
  Span span;
  for (int64_t y = 0; y < pixels.height; y++) {
    const auto* const from = pixels.first + y * pixels.row;
    for (int64_t x = 0; x < pixels.width; x += kSpan) {
      const auto count = std::min(kSpan, pixels.width - x);
      unpack(from + 3 * x, count, span);
      loop(span);
      pack(span, count, to + 3 * x);
    }
    to += 3 * pixels.width;
  }
}

/// Rounded down. Rounding matters for the few colours whose grey value is a whole number; there it is torchvision's.
[[gnu::always_inline]] inline float grey_of(float red, float green, float blue) {
  const float sum = fused(blue, 0.114F, fused(green, 0.587F, red * 0.2989F));
  return static_cast<float>(static_cast<int32_t>(sum));
}

[[gnu::always_inline]] inline float within_1(float value) {
  value = value < 0 ? 0 : value;
  return value > 1 ? 1 : value;
}

/// Rounds to the nearest whole number, ties to even, for values below 2^22.
[[gnu::always_inline]] inline float rounded(float value) {
  constexpr float kAllWhole = 0x1.8p23F;  // floats of this size have no fraction
  return (value + kAllWhole) - kAllWhole;
}

template <bool kDense>
[[gnu::always_inline]] inline void scale_row(const uint8_t* from, int64_t width, const ChannelScale& scale, float* to, int64_t channel,
                                             int64_t column) {
  const auto mean = scale.mean, deviation = scale.deviation;
  constexpr float kPart = 1.0 / 255;
  if constexpr (kDense) column = 1;
  auto *const red = to, *const green = to + channel, *const blue = to + 2 * channel;
#pragma GCC ivdep
  for (int64_t x = 0; x < width; x++) {
    red[x * column] = (static_cast<float>(from[3 * x]) * kPart - mean[0]) / deviation[0];
    green[x * column] = (static_cast<float>(from[3 * x + 1]) * kPart - mean[1]) / deviation[1];
    blue[x * column] = (static_cast<float>(from[3 * x + 2]) * kPart - mean[2]) / deviation[2];
  }
}

/// The channels of 16 pixels, which fill whole vectors on any processor.
constexpr int64_t kPattern = 48;
struct Pattern {
  alignas(64) std::array<float, kPattern> mean, deviation;
};

/// Also for places whose channels lie together: the bytes are then one row of numbers.
[[gnu::always_inline]] inline void scale_packed_row(const uint8_t* from, int64_t count, const Pattern& pattern, float* to) {
  constexpr float kPart = 1.0 / 255;
  const auto *const mean = pattern.mean.data(), *const deviation = pattern.deviation.data();
  const auto scaled = [&](int64_t i, int64_t j) __attribute__((always_inline)) {
    to[i + j] = (static_cast<float>(from[i + j]) * kPart - mean[j]) / deviation[j];
  };
  int64_t i = 0;
  for (; i + kPattern <= count; i += kPattern) {
#pragma GCC ivdep
    for (int64_t j = 0; j < kPattern; j++) scaled(i, j);
  }
  for (int64_t j = 0; i + j < count; j++) scaled(i, j);
}

}  // namespace

void map_bytes(const Pixels& pixels, const ByteTables& tables, uint8_t* to) {
  const auto *const red = tables[0].data(), *const green = tables[1].data(), *const blue = tables[2].data();
  for (int64_t y = 0; y < pixels.height; y++) {
    const auto* from = pixels.first + y * pixels.row;
    for (int64_t x = 0; x < pixels.width; x++, from += 3, to += 3) {
      to[0] = red[from[0]];
      to[1] = green[from[1]];
      to[2] = blue[from[2]];
    }
  }
}

ByteCounts count_bytes(const Pixels& pixels) {
  ByteCounts counts = {};
  auto *const red = counts[0].data(), *const green = counts[1].data(), *const blue = counts[2].data();
  for (int64_t y = 0; y < pixels.height; y++) {
    const auto* from = pixels.first + y * pixels.row;
    for (int64_t x = 0; x < pixels.width; x++, from += 3) {
      red[from[0]]++;
      green[from[1]]++;
      blue[from[2]]++;
    }
  }
  return counts;
}

TESSERA_KERNEL int64_t sum_of_greys(const Pixels& pixels) {
  Span span;
  int64_t sum = 0;
  for (int64_t y = 0; y < pixels.height; y++) {
    const auto* const from = pixels.first + y * pixels.row;
    for (int64_t x = 0; x < pixels.width; x += kSpan) {
      const auto count = std::min(kSpan, pixels.width - x);
      if (count < kSpan) span = {};
      unpack(from + 3 * x, count, span);
      int32_t of_span = 0;
      for (size_t i = 0; i < kSpan; i++) of_span += static_cast<int32_t>(grey_of(span.red[i], span.green[i], span.blue[i]));
      sum += of_span;
    }
  }
  return sum;
}

TESSERA_KERNEL void mix_with_grey(const Pixels& pixels, float of_value, float of_grey, uint8_t* to) {
  change_spans(
      pixels, to, [=](Span & span) __attribute__((always_inline)) {
        for (size_t i = 0; i < kSpan; i++) {
          const float grey = grey_of(span.red[i], span.green[i], span.blue[i]);
          span.red[i] = fused(grey, of_grey, span.red[i] * of_value);
          span.green[i] = fused(grey, of_grey, span.green[i] * of_value);
          span.blue[i] = fused(grey, of_grey, span.blue[i] * of_value);
        }
      });
}

TESSERA_KERNEL void turn_hue(const Pixels& pixels, float turn, uint8_t* to) {
  constexpr float kPart = 1.0 / 255, kSixth = 1.0 / 6, kBytes = 256 - 1e-3;
  change_spans(
      pixels, to, [=](Span & span) __attribute__((always_inline)) {
        for (size_t i = 0; i < kSpan; i++) {
          const float red = span.red[i] * kPart, green = span.green[i] * kPart, blue = span.blue[i] * kPart;
          const float of_red_green = red > green ? red : green, under_red_green = red > green ? green : red;
          const float most = of_red_green > blue ? of_red_green : blue, least = under_red_green > blue ? blue : under_red_green;
          const float range = most - least;
          const float saturation = range / (range == 0 ? 1 : most), divisor = range == 0 ? 1 : range;
          const float from_red = (most - red) / divisor, from_green = (most - green) / divisor, from_blue = (most - blue) / divisor;
          const float where_green = (from_red + 2) - from_blue, where_blue = (from_green + 4) - from_red;
          const float not_red = most == green ? where_green : where_blue;
          float hue = (most == red ? from_blue - from_green : not_red) * kSixth + 1;
          hue -= hue >= 1 ? 1 : 0;
          hue += turn;
          hue -= hue >= 1 ? 1 : 0;
          hue += hue < 0 ? 1 : 0;
          // The circle of hues has six parts. In each of them one channel is the strongest, one the weakest, and one between them.
          const float sixths = hue * 6;
          float part = static_cast<float>(static_cast<int32_t>(sixths));
          const float behind = saturation * (sixths - part), rest = 1 - saturation;
          part = part == 6 ? 0 : part;
          const float falling = within_1((1 - behind) * most), rising = within_1((behind + rest) * most), weakest = within_1(rest * most);
          const float red_2 = part == 4 ? rising : weakest, red_1 = part == 1 ? falling : red_2;
          const float green_2 = part == 3 ? falling : weakest, green_1 = part == 0 ? rising : green_2;
          const float blue_2 = part == 5 ? falling : weakest, blue_1 = part == 2 ? rising : blue_2;
          span.red[i] = (((part == 0) | (part == 5)) ? most : red_1) * kBytes;
          span.green[i] = (((part == 1) | (part == 2)) ? most : green_1) * kBytes;
          span.blue[i] = (((part == 3) | (part == 4)) ? most : blue_1) * kBytes;
        }
      });
}

TESSERA_KERNEL void mix_with_blur(const Pixels& pixels, float of_blur, uint8_t* to) {
  const int64_t bytes = 3 * pixels.width;
  for (int64_t y = 0; y < pixels.height; y++, to += bytes) {
    const auto* const from = pixels.first + y * pixels.row;
    std::memcpy(to, from, static_cast<size_t>(bytes));
    if (y == 0 || y == pixels.height - 1) continue;
    const auto *const above = from - pixels.row, *const below = from + pixels.row;
#pragma GCC ivdep
    for (int64_t i = 3; i < bytes - 3; i++) {
      const int32_t value = from[i];
      const int32_t sum =
          above[i - 3] + above[i] + above[i + 3] + from[i - 3] + 5 * value + from[i + 3] + below[i - 3] + below[i] + below[i + 3];
      const int32_t blurred = ((sum + 6) * 5042) >> 16;  // sum / 13, rounded
      to[i] = to_byte(fused(static_cast<float>(blurred - value), of_blur, static_cast<float>(value)));
    }
  }
}

void mirror(const Pixels& pixels, uint8_t* to) {
  for (int64_t y = 0; y < pixels.height; y++, to += 3 * pixels.width) {
    const auto* from = pixels.first + y * pixels.row + 3 * (pixels.width - 1);
    std::memcpy(to, from, 3);
    // Copies four bytes at a time, of which the next pixel overwrites the last one. Except for the last pixel, the fourth byte lies within
    // both pictures.
    int64_t x = 1;
    for (; x < pixels.width - 1; x++) std::memcpy(to + 3 * x, from - 3 * x, 4);
    if (x < pixels.width) std::memcpy(to + 3 * x, from - 3 * x, 3);
  }
}

TESSERA_KERNEL void take_nearest(const Pixels& pixels, const Origin& origin, uint8_t* to) {
  std::array<int32_t, kSpan> columns = {}, rows = {};
  const auto height = static_cast<float>(pixels.height), width = static_cast<float>(pixels.width);
  const auto of_x = origin.x, of_y = origin.y;
  for (int64_t row = 0; row < pixels.height; row++) {
    const float y = static_cast<float>(row) - (height - 1) * 0.5F;
    for (int64_t begin = 0; begin < pixels.width; begin += kSpan) {
      for (int32_t i = 0; i < kSpan; i++) {
        const float x = static_cast<float>(static_cast<int32_t>(begin) + i) - (width - 1) * 0.5F;
        const float across = x * of_x[0] + y * of_x[1] + of_x[2], down = x * of_y[0] + y * of_y[1] + of_y[2];
        const float column = rounded((across + 1) * (width * 0.5F) - 0.5F), line = rounded((down + 1) * (height * 0.5F) - 0.5F);
        const bool is_inside = (column >= 0) & (column < width) & (line >= 0) & (line < height);
        columns[static_cast<size_t>(i)] = static_cast<int32_t>(is_inside ? column : -1);
        rows[static_cast<size_t>(i)] = static_cast<int32_t>(is_inside ? line : -1);
      }
      const auto count = static_cast<size_t>(std::min(kSpan, pixels.width - begin));
      for (size_t i = 0; i < count; i++, to += 3) {
        if (columns[i] < 0) {
          std::memset(to, 0, 3);
        } else {
          std::memcpy(to, pixels.first + rows[i] * pixels.row + 3 * columns[i], 3);
        }
      }
    }
  }
}

TESSERA_KERNEL void scale_bytes(const Pixels& pixels, const ChannelScale& scale, const FloatPlace& place) {
  Pattern pattern;
  for (size_t i = 0; i < kPattern; i++) {
    pattern.mean[i] = scale.mean[i % 3];
    pattern.deviation[i] = scale.deviation[i % 3];
  }
  for (int64_t y = 0; y < pixels.height; y++) {
    const auto* const from = pixels.first + y * pixels.row;
    auto* const to = place.first + y * place.row;
    if (place.channel == 1 && place.column == 3) {
      scale_packed_row(from, 3 * pixels.width, pattern, to);
    } else if (place.column == 1) {
      scale_row<true>(from, pixels.width, scale, to, place.channel, place.column);
    } else {
      scale_row<false>(from, pixels.width, scale, to, place.channel, place.column);
    }
  }
}

}  // namespace tessera::vision
