// The loops of transforms over the bytes of pictures. Where a result depends on how floats are rounded, they round as libtorch's operators
// do.
#pragma once

#include <array>
#include <cstdint>

namespace tessera::vision {

/// The bytes of a picture: three for each pixel, and `row` from one row to the next. All results below have rows without gaps.
struct Pixels {
  const uint8_t* first;
  int64_t row;
  int64_t height, width;
};

/// a * b + c, rounded once, as the fused instructions with which libtorch adds a multiple of a tensor: the product of two floats is exact
/// in double.
[[gnu::always_inline]] inline float fused(float a, float b, float c) {
  return static_cast<float>(static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(c));
}

/// Rounds towards 0, within the range of a byte.
[[gnu::always_inline]] inline uint8_t to_byte(float value) {
  value = value < 0 ? 0 : value;
  value = value > 255 ? 255 : value;
  return static_cast<uint8_t>(static_cast<int32_t>(value));
}

/// The new value of each value, for each channel.
using ByteTables = std::array<std::array<uint8_t, 256>, 3>;
void map_bytes(const Pixels& pixels, const ByteTables& tables, uint8_t* to);

/// How often each channel has each value.
using ByteCounts = std::array<std::array<uint32_t, 256>, 3>;
ByteCounts count_bytes(const Pixels& pixels);

/// The sum of the grey values, each rounded down.
int64_t sum_of_greys(const Pixels& pixels);

/// value * of_value + grey * of_grey
void mix_with_grey(const Pixels& pixels, float of_value, float of_grey, uint8_t* to);

/// Adds this fraction of a full turn to the hue.
void turn_hue(const Pixels& pixels, float turn, uint8_t* to);

/// Moves each value by this fraction towards the mean of its neighbours, in which it counts five times. Pixels at the edges stay.
void mix_with_blur(const Pixels& pixels, float of_blur, uint8_t* to);

/// Exchanges left and right.
void mirror(const Pixels& pixels, uint8_t* to);

/// The place from which a pixel is taken, in a picture that reaches from -1 to 1: x[0] * column + x[1] * row + x[2], and the same with y.
/// Columns and rows are counted from the middle.
struct Origin {
  std::array<float, 3> x, y;
};
/// Takes the pixel that is nearest to the origin; 0 if that is outside.
void take_nearest(const Pixels& pixels, const Origin& origin, uint8_t* to);

struct ChannelScale {
  std::array<float, 3> mean, deviation;
};
/// The place to which the floats of a picture are written: the distances between channels, rows and columns.
struct FloatPlace {
  float* first;
  int64_t channel, row, column;
};
/// (value / 255 - mean) / deviation
void scale_bytes(const Pixels& pixels, const ChannelScale& scale, const FloatPlace& place);

}  // namespace tessera::vision
