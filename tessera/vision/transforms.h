// Transforms of pictures, equal to those of torchvision.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

#include "tessera/vision/image.h"

namespace tessera::vision {

enum class Interpolation { Nearest, Bilinear, Bicubic };
at::Tensor resize(const at::Tensor& image, ImageSize size, Interpolation interpolation = Interpolation::Bilinear);
ImageSize resized_shorter_side(ImageSize image, int64_t side);
at::Tensor crop(const at::Tensor& image, Box box);
Box center_box(ImageSize image, ImageSize crop);
at::Tensor flip(const at::Tensor& image);
class Draws {
 public:
  explicit Draws(uint64_t seed) : seed_(seed) {}
  double uniform(double from, double to);
  int64_t below(int64_t n);
  bool chance(double p);

 private:
  uint64_t seed_;
};
struct RandomResizedCrop {
  int64_t size = 224;
  double smallest = 0.08, largest = 1, narrowest = 3. / 4, widest = 4. / 3;
};
Box draw_box(const RandomResizedCrop& options, ImageSize image, Draws& draws);
struct ColorJitter {
  double brightness = 0, contrast = 0, saturation = 0, hue = 0;
};
at::Tensor jitter(const at::Tensor& image, const ColorJitter& options, Draws& draws);
struct RandAugment {
  int operations = 2;
  int magnitude = 9;
  int bins = 31;
};
at::Tensor rand_augment(const at::Tensor& image, const RandAugment& options, Draws& draws);
struct Normalize {
  std::array<double, 3> mean = {0.485, 0.456, 0.406}, deviation = {0.229, 0.224, 0.225};
};
void normalize_into(const at::Tensor& image, const Normalize& options, at::Tensor place);

}  // namespace tessera::vision
