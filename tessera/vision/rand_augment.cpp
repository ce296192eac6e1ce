// The operations of RandAugment.
#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/vision/picture.h"
#include "tessera/vision/transforms.h"

namespace tessera::vision {
namespace {

constexpr double kDegree = std::numbers::pi / 180;

/// The movement of the pixels of an image, in its coordinates.
struct Motion {
  double angle = 0, shear_x = 0, shear_y = 0;  // in radians
  double across = 0, down = 0;                 // in pixels
  double center_x = 0, center_y = 0;           // the fixed point, from the middle of the image
};

at::Tensor moved(const at::Tensor& image, const Motion& motion) {
  const auto [angle, shear_x, shear_y, across, down, center_x, center_y] = motion;
  // The rotation with shears has the determinant 1, so its inverse is {{d, -b}, {-c, a}}.
  const double a = std::cos(angle - shear_y) / std::cos(shear_y), c = std::sin(angle - shear_y) / std::cos(shear_y);
  const double b = -(a * std::tan(shear_x) + std::sin(angle)), d = std::cos(angle) - c * std::tan(shear_x);
  const double to_x = center_x + across, to_y = center_y + down;
  const std::array<double, 3> x = {d, -b, center_x - d * to_x - -b * to_y}, y = {-c, a, center_y - -c * to_x - a * to_y};
  return changed(image, [&](const Pixels& pixels, uint8_t* to) {
    const auto half_width = static_cast<float>(pixels.width) * 0.5F, half_height = static_cast<float>(pixels.height) * 0.5F;
    Origin origin = {};
    for (size_t i = 0; i < 3; i++) {
      origin.x[i] = static_cast<float>(x[i]) / half_width;
      origin.y[i] = static_cast<float>(y[i]) / half_height;
    }
    take_nearest(pixels, origin, to);
  });
}

/// A shear by a slope, in which the upper left corner stays.
Motion shear(const at::Tensor& image, double slope_x, double slope_y) {
  const auto size = size_of(image);
  // Through degrees, as in torchvision, because the rounding can matter.
  const auto of_slope = [](double slope) { return std::atan(slope) / kDegree * kDegree; };
  return {.shear_x = of_slope(slope_x),
          .shear_y = of_slope(slope_y),
          .center_x = static_cast<double>(size.width) * -0.5,
          .center_y = static_cast<double>(size.height) * -0.5};
}

at::Tensor posterized(const at::Tensor& image, double bits) {
  if (!(bits >= 0 && bits < 9)) throw UsageError("posterize can't keep {} bits of a byte; from 0 to 8", bits);
  const auto mask = static_cast<uint8_t>(0xff << (8 - static_cast<int>(bits)));
  return mapped(image, [&](size_t /*channel*/, size_t value) { return static_cast<uint8_t>(value & mask); });
}

at::Tensor solarized(const at::Tensor& image, double magnitude) {
  const auto threshold = static_cast<float>(255 * magnitude);
  return mapped(image, [&](size_t /*channel*/, size_t value) {
    return static_cast<uint8_t>(static_cast<float>(value) >= threshold ? 255 - value : value);
  });
}

/// The smallest and the largest value of a channel.
std::pair<size_t, size_t> ends_of(const std::array<uint32_t, 256>& counts) {
  size_t least = 0, most = 255;
  while (counts[least] == 0) least++;
  while (counts[most] == 0) most--;
  return {least, most};
}

/// Stretches each channel so that it has values from 0 to 255.
at::Tensor auto_contrasted(const at::Tensor& image) {
  const auto [picture, pixels] = picture_of(image);
  const auto counts = count_bytes(pixels);
  const std::array ends = {ends_of(counts[0]), ends_of(counts[1]), ends_of(counts[2])};
  return mapped(picture, [&](size_t channel, size_t value) {
    const auto [least, most] = ends[channel];
    if (least == most) return static_cast<uint8_t>(value);
    constexpr float kPart = 1.0 / 255;
    return to_byte((static_cast<float>(value) - static_cast<float>(least)) / (static_cast<float>(most - least) * kPart));
  });
}

/// Gives each channel about as many pixels of each value, by Pillow's rule.
at::Tensor equalized(const at::Tensor& image) {
  const auto [picture, pixels] = picture_of(image);
  const auto counts = count_bytes(pixels);
  ByteTables tables = {};
  for (size_t channel = 0; channel < 3; channel++) {
    const auto& of = counts[channel];
    const auto step = (pixels.height * pixels.width - of[ends_of(of).second]) / 255;
    int64_t before = 0;  // pixels of smaller values
    for (size_t value = 0; value < 256; value++) {
      tables[channel][value] =
          static_cast<uint8_t>(step == 0 ? static_cast<int64_t>(value) : std::min<int64_t>((before + step / 2) / step, 255));
      before += of[value];
    }
  }
  return mapped(picture, [&](size_t channel, size_t value) { return tables[channel][value]; });
}

constexpr int kBins = 31;  // of magnitudes, as by torchvision's default
constexpr double kTranslated = 150. / 331;

/// The magnitudes of an operation: those of bins go evenly from `first` to `last`, which for translations are fractions of a side of the
/// image.
struct OperationRow {
  double first, last;
  bool is_signed;
  at::Tensor (*apply)(const at::Tensor& image, double magnitude);
};

/// In the order of AugmentOperation.
constexpr std::array kOperationRows = {
    OperationRow{0, 0, false, [](const at::Tensor& image, double /*none*/) { return image; }},
    OperationRow{0, 0.3, true, [](const at::Tensor& image, double slope) { return moved(image, shear(image, slope, 0)); }},
    OperationRow{0, 0.3, true, [](const at::Tensor& image, double slope) { return moved(image, shear(image, 0, slope)); }},
    OperationRow{0, kTranslated, true, [](const at::Tensor& image, double pixels) { return moved(image, {.across = std::trunc(pixels)}); }},
    OperationRow{0, kTranslated, true, [](const at::Tensor& image, double pixels) { return moved(image, {.down = std::trunc(pixels)}); }},
    OperationRow{0, 30, true,
                 [](const at::Tensor& image, double degrees) {
                   const double turn = std::fmod(degrees, 360);
                   return moved(image, {.angle = -(turn < 0 ? turn + 360 : turn) * kDegree});
                 }},
    OperationRow{0, 0.9, true, [](const at::Tensor& image, double more) { return adjust_brightness(image, 1 + more); }},
    OperationRow{0, 0.9, true, [](const at::Tensor& image, double more) { return adjust_saturation(image, 1 + more); }},
    OperationRow{0, 0.9, true, [](const at::Tensor& image, double more) { return adjust_contrast(image, 1 + more); }},
    OperationRow{0, 0.9, true, [](const at::Tensor& image, double more) { return adjust_sharpness(image, 1 + more); }},
    OperationRow{8, 4, false, posterized},
    OperationRow{1, 0, false, solarized},
    OperationRow{0, 0, false, [](const at::Tensor& image, double /*none*/) { return auto_contrasted(image); }},
    OperationRow{0, 0, false, [](const at::Tensor& image, double /*none*/) { return equalized(image); }},
};
static_assert(kOperationRows.size() == static_cast<size_t>(AugmentOperation::Equalize) + 1);

const OperationRow& row_of(AugmentOperation operation) {
  return kOperationRows.at(static_cast<size_t>(operation));
}

double draw_magnitude(AugmentOperation operation, int bin, ImageSize size, Draws& draws) {
  const auto& row = row_of(operation);
  double last = row.last;
  if (operation == AugmentOperation::TranslateX) last *= static_cast<double>(size.width);
  if (operation == AugmentOperation::TranslateY) last *= static_cast<double>(size.height);
  const auto magnitude = static_cast<double>(at::linspace(row.first, last, kBins, at::kFloat)[bin].item<float>());
  if (operation == AugmentOperation::Posterize) return std::nearbyint(magnitude);
  return row.is_signed && draws.uniform(0, 1) <= 0.5 ? -magnitude : magnitude;
}

}  // namespace

at::Tensor augment(const at::Tensor& image, AugmentOperation operation, double magnitude) {
  return row_of(operation).apply(image, magnitude);
}

at::Tensor rand_augment(const at::Tensor& image, const RandAugment& options, Draws& draws) {
  if (options.operations < 0 || options.magnitude < 0 || options.magnitude >= kBins) {
    throw UsageError("RandAugment: there can't be {} operations with magnitude {}; magnitudes are from 0 to {}", options.operations,
                     options.magnitude, kBins - 1);
  }
  auto result = image;
  for (int i = 0; i < options.operations; i++) {
    const auto operation = static_cast<AugmentOperation>(draws.below(std::ssize(kOperationRows)));
    result = augment(result, operation, draw_magnitude(operation, options.magnitude, size_of(image), draws));
  }
  return result;
}

}  // namespace tessera::vision
