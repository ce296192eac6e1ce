#include "tessera/vision/transforms.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/vision/picture.h"

namespace tessera::vision {
namespace {

/// Returns the beginning of a part of this length in the middle. Of two such places it is the even one; outside of a shorter image, less
/// is before it than behind it.
int64_t middle(int64_t length, int64_t part) {
  if (part > length) return -((part - length) / 2);
  const auto half = (length - part) / 2;
  return (length - part) % 2 == 0 ? half : half + half % 2;
}

}  // namespace

ImageSize size_of(const at::Tensor& image) {
  if (image.scalar_type() != at::kByte || !image.device().is_cpu() || image.dim() != 3 || image.size(0) != 3 || image.numel() == 0) {
    throw UsageError(
        "transforms are for pictures in the CPU's memory, which are bytes {{3, height, width}}, and not for {} {} on {}; decode_image() "
        "makes them",
        c10::toString(image.scalar_type()), c10::str(image.sizes()), image.device().str());
  }
  return {.height = image.size(1), .width = image.size(2)};
}

Picture picture_of(const at::Tensor& image) {
  const auto size = size_of(image);
  auto tensor = image.stride(0) == 1 && image.stride(2) == 3 ? image : image.permute({1, 2, 0}).contiguous().permute({2, 0, 1});
  const Pixels pixels = {.first = tensor.const_data_ptr<uint8_t>(), .row = tensor.stride(1), .height = size.height, .width = size.width};
  return {.tensor = std::move(tensor), .pixels = pixels};
}

at::Tensor empty_picture(ImageSize size) {
  return at::empty({size.height, size.width, 3}, at::kByte).permute({2, 0, 1});
}

at::Tensor resize(const at::Tensor& image, ImageSize size, Interpolation interpolation) {
  if (size.height < 1 || size.width < 1) throw UsageError("an image can't become {} by {}", size.height, size.width);
  const auto [tensor, pixels] = picture_of(image);
  if (size.height == pixels.height && size.width == pixels.width) return image;
  // libtorch's kernels tell by the stride of a batch of one whether the channels of their result lie together.
  const auto batch = tensor.as_strided({1, 3, pixels.height, pixels.width}, {pixels.height * pixels.row, 1, pixels.row, 3});
  const std::array<int64_t, 2> sizes = {size.height, size.width};
  const at::IntArrayRef to = sizes;
  const auto resized = interpolation == Interpolation::Bilinear ? at::_upsample_bilinear2d_aa(batch, to, /*align_corners=*/false)
                                                                : at::_upsample_bicubic2d_aa(batch, to, /*align_corners=*/false);
  return resized.select(0, 0);
}

ImageSize resized_shorter_side(ImageSize image, int64_t side) {
  if (image.height < 1 || image.width < 1 || side < 1) {
    throw UsageError("the shorter side of an image of {} by {} can't become {}", image.height, image.width, side);
  }
  if (image.width <= image.height) return {.height = side * image.height / image.width, .width = side};
  return {.height = side, .width = side * image.width / image.height};
}

at::Tensor crop(const at::Tensor& image, Box box) {
  const auto size = size_of(image);
  if (box.height < 1 || box.width < 1) throw UsageError("there is no part of an image of {} by {}", box.height, box.width);
  const auto top = std::max<int64_t>(box.top, 0), bottom = std::min(box.top + box.height, size.height);
  const auto left = std::max<int64_t>(box.left, 0), right = std::min(box.left + box.width, size.width);
  if (bottom - top == box.height && right - left == box.width) return image.slice(1, top, bottom).slice(2, left, right);
  auto part = empty_picture({.height = box.height, .width = box.width}).zero_();
  if (top < bottom && left < right) {
    part.slice(1, top - box.top, bottom - box.top)
        .slice(2, left - box.left, right - box.left)
        .copy_(image.slice(1, top, bottom).slice(2, left, right));
  }
  return part;
}

Box center_box(ImageSize image, ImageSize crop) {
  return {.top = middle(image.height, crop.height), .left = middle(image.width, crop.width), .height = crop.height, .width = crop.width};
}

at::Tensor flip(const at::Tensor& image) {
  return changed(image, mirror);
}

Box draw_box(const RandomResizedCrop& options, ImageSize image, Draws& draws) {
  if (!(0 < options.smallest && options.smallest <= options.largest && options.largest <= 1)) {
    throw UsageError("RandomResizedCrop: a part can't have from {} to {} of an image's area; 0 < smallest <= largest <= 1",
                     options.smallest, options.largest);
  }
  if (!(0 < options.narrowest && options.narrowest <= options.widest)) {
    throw UsageError("RandomResizedCrop: a part can't be from {} to {} times as wide as high; 0 < narrowest <= widest", options.narrowest,
                     options.widest);
  }
  const auto height_of_image = static_cast<double>(image.height), width_of_image = static_cast<double>(image.width);
  for (int attempt = 0; attempt < 10; attempt++) {
    const double area = height_of_image * width_of_image * draws.uniform(options.smallest, options.largest);
    const double ratio = std::exp(draws.uniform(std::log(options.narrowest), std::log(options.widest)));
    const int64_t width = std::llrint(std::sqrt(area * ratio)), height = std::llrint(std::sqrt(area / ratio));
    if (width < 1 || width > image.width || height < 1 || height > image.height) continue;
    const auto top = draws.below(image.height - height + 1);
    return {.top = top, .left = draws.below(image.width - width + 1), .height = height, .width = width};
  }
  // The largest part in the middle that has such a ratio.
  Box box = {.height = image.height, .width = image.width};
  const double ratio = width_of_image / height_of_image;
  if (ratio < options.narrowest) box.height = std::llrint(width_of_image / options.narrowest);
  if (ratio > options.widest) box.width = std::llrint(height_of_image * options.widest);
  box.top = (image.height - box.height) / 2;
  box.left = (image.width - box.width) / 2;
  return box;
}

void normalize_into(const at::Tensor& image, const Normalize& options, const at::Tensor& place) {
  const auto [tensor, pixels] = picture_of(image);
  if (place.scalar_type() != at::kFloat || !place.device().is_cpu() || place.sizes() != image.sizes()) {
    throw UsageError("a picture {} can't become numbers in {} {} on {}; give a place of floats of the same size in the CPU's memory",
                     c10::str(image.sizes()), c10::toString(place.scalar_type()), c10::str(place.sizes()), place.device().str());
  }
  ChannelScale scale = {};
  for (size_t channel = 0; channel < 3; channel++) {
    if (options.deviation[channel] == 0)
      throw UsageError("Normalize: the deviation of channel {} is 0, by which numbers can't be divided", channel);
    scale.mean[channel] = static_cast<float>(options.mean[channel]);
    scale.deviation[channel] = static_cast<float>(options.deviation[channel]);
  }
  scale_bytes(pixels, scale,
              {.first = place.mutable_data_ptr<float>(), .channel = place.stride(0), .row = place.stride(1), .column = place.stride(2)});
}

}  // namespace tessera::vision
