// Pictures as the loops over their bytes take them.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/vision/image.h"
#include "tessera/vision/transform_kernels.h"

namespace tessera::vision {

/// A picture's bytes, and the tensor that holds them.
struct Picture {
  at::Tensor tensor;
  Pixels pixels;
};

/// Copies the picture only if its channels do not lie together. Throws UsageError if it is not a tensor of bytes {3, height, width}.
Picture picture_of(const at::Tensor& image);
/// Throws UsageError if it is not a picture.
ImageSize size_of(const at::Tensor& image);

/// Its values are uninitialized.
at::Tensor empty_picture(ImageSize size);

/// Calls `loop(pixels, to)`, which writes a picture of the same size.
template <class Loop>
at::Tensor changed(const at::Tensor& image, const Loop& loop) {
  const auto picture = picture_of(image);
  auto result = empty_picture({.height = picture.pixels.height, .width = picture.pixels.width});
  loop(picture.pixels, result.template mutable_data_ptr<uint8_t>());
  return result;
}

/// Returns a picture with the value `of(channel, value)` in place of each value.
template <class Of>
at::Tensor mapped(const at::Tensor& image, const Of& of) {
  ByteTables tables;
  for (size_t channel = 0; channel < tables.size(); channel++) {
    for (size_t value = 0; value < tables[channel].size(); value++) tables[channel][value] = of(channel, value);
  }
  return changed(image, [&](const Pixels& pixels, uint8_t* to) { map_bytes(pixels, tables, to); });
}

}  // namespace tessera::vision
