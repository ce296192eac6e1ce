// Transforms of pictures, with the pixels that torchvision.transforms.v2.functional makes of uint8 tensors on a processor with AVX2. Random
// values are drawn first, so each transform is a function of a picture and plain values. No transform changes the picture it is given.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

#include "tessera/vision/draws.h"
#include "tessera/vision/image.h"

namespace tessera::vision {

enum class Interpolation { Bilinear, Bicubic };

/// Antialiased.
at::Tensor resize(const at::Tensor& image, ImageSize size, Interpolation interpolation = Interpolation::Bilinear);
/// Returns the size of an image whose shorter side becomes `side`, as transforms.Resize(side) does.
ImageSize resized_shorter_side(ImageSize image, int64_t side);
/// Returns a view if the box is within the image; otherwise a copy, with 0 outside of the image.
at::Tensor crop(const at::Tensor& image, Box box);
/// Returns the box of transforms.CenterCrop, which begins outside of an image that is smaller.
Box center_box(ImageSize image, ImageSize crop);
/// Exchanges left and right.
at::Tensor flip(const at::Tensor& image);

/// A factor of 1 changes nothing. For hue it is a fraction of a full turn, from -0.5 to 0.5, and 0 changes nothing.
at::Tensor adjust_brightness(const at::Tensor& image, double factor);
at::Tensor adjust_contrast(const at::Tensor& image, double factor);
at::Tensor adjust_saturation(const at::Tensor& image, double factor);
at::Tensor adjust_hue(const at::Tensor& image, double factor);
at::Tensor adjust_sharpness(const at::Tensor& image, double factor);

/// A part of random area and shape, which is resized to `size` by `size`.
struct RandomResizedCrop {
  int64_t size = 224;
  double smallest = 0.08, largest = 1;         // parts of the image's area
  double narrowest = 3. / 4, widest = 4. / 3;  // width by height
};
Box draw_box(const RandomResizedCrop& options, ImageSize image, Draws& draws);

/// The furthest that each factor may be from 1, and that of hue from 0. The four are applied in random order.
struct ColorJitter {
  double brightness = 0, contrast = 0, saturation = 0, hue = 0;
};
at::Tensor jitter(const at::Tensor& image, const ColorJitter& options, Draws& draws);

enum class AugmentOperation {
  Identity,
  ShearX,
  ShearY,
  TranslateX,
  TranslateY,
  Rotate,
  Brightness,
  Color,
  Contrast,
  Sharpness,
  Posterize,
  Solarize,
  AutoContrast,
  Equalize,
};
/// The magnitude is a slope for shears, in pixels for translations, in degrees for the rotation; brightness to sharpness have the factor 1
/// + magnitude; posterize keeps that many bits; solarize inverts values from 255 * magnitude. The other three have none. Pixels from
/// outside are 0.
at::Tensor augment(const at::Tensor& image, AugmentOperation operation, double magnitude);

/// A number of random operations with the same magnitude, from 0 to 30.
struct RandAugment {
  int operations = 2;
  int magnitude = 9;
};
at::Tensor rand_augment(const at::Tensor& image, const RandAugment& options, Draws& draws);

/// Scales bytes to numbers from 0 to 1, and these to (number - mean) / deviation.
struct Normalize {
  std::array<double, 3> mean = {0.485, 0.456, 0.406}, deviation = {0.229, 0.224, 0.225};
};
/// `place` is float {3, height, width}, with any strides.
void normalize_into(const at::Tensor& image, const Normalize& options, const at::Tensor& place);

}  // namespace tessera::vision
