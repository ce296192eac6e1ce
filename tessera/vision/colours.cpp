// Transforms of colours.
#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/vision/picture.h"
#include "tessera/vision/transforms.h"

namespace tessera::vision {
namespace {

float checked_factor(double factor, const char* name) {
  if (!(factor >= 0)) throw UsageError("the {} of an image can't be multiplied by {}; factors are 0 or larger", name, factor);
  return static_cast<float>(factor);
}

/// Returns the weight of the grey value if the value itself has the weight `factor`.
float rest_of(double factor) {
  return static_cast<float>(1 - factor);
}

}  // namespace

at::Tensor adjust_brightness(const at::Tensor& image, double factor) {
  const auto times = checked_factor(factor, "brightness");
  return mapped(image, [&](size_t /*channel*/, size_t value) { return to_byte(static_cast<float>(value) * times); });
}

at::Tensor adjust_contrast(const at::Tensor& image, double factor) {
  const auto times = checked_factor(factor, "contrast"), rest = rest_of(factor);
  const auto [picture, pixels] = picture_of(image);
  const float mean = static_cast<float>(sum_of_greys(pixels)) / static_cast<float>(pixels.height * pixels.width);
  return mapped(picture, [&](size_t /*channel*/, size_t value) { return to_byte(fused(mean, rest, static_cast<float>(value) * times)); });
}

at::Tensor adjust_saturation(const at::Tensor& image, double factor) {
  const auto times = checked_factor(factor, "saturation"), rest = rest_of(factor);
  return changed(image, [&](const Pixels& pixels, uint8_t* to) { mix_with_grey(pixels, times, rest, to); });
}

at::Tensor adjust_hue(const at::Tensor& image, double factor) {
  if (!(-0.5 <= factor && factor <= 0.5)) throw UsageError("the hue of an image can't be turned by {}; from -0.5 to 0.5", factor);
  return changed(image, [&](const Pixels& pixels, uint8_t* to) { turn_hue(pixels, static_cast<float>(factor), to); });
}

at::Tensor adjust_sharpness(const at::Tensor& image, double factor) {
  checked_factor(factor, "sharpness");
  return changed(image, [&](const Pixels& pixels, uint8_t* to) { mix_with_blur(pixels, rest_of(factor), to); });
}

at::Tensor jitter(const at::Tensor& image, const ColorJitter& options, Draws& draws) {
  if (!(options.brightness >= 0 && options.contrast >= 0 && options.saturation >= 0 && options.hue >= 0 && options.hue <= 0.5)) {
    throw UsageError("ColorJitter: factors can't differ by brightness {}, contrast {}, saturation {} and hue {}; from 0, and hue to 0.5",
                     options.brightness, options.contrast, options.saturation, options.hue);
  }
  using Adjust = at::Tensor (*)(const at::Tensor& image, double factor);
  struct Step {
    Adjust adjust;
    double middle, reach;
    double factor = 0;
  };
  std::array<Step, 4> steps = {{{adjust_brightness, 1, options.brightness},
                                {adjust_contrast, 1, options.contrast},
                                {adjust_saturation, 1, options.saturation},
                                {adjust_hue, 0, options.hue}}};
  std::array<size_t, 4> order = {0, 1, 2, 3};
  for (size_t i = 3; i > 0; i--) std::swap(order[i], order[static_cast<size_t>(draws.below(static_cast<int64_t>(i) + 1))]);
  for (auto& step : steps) {
    if (step.reach == 0) continue;
    const double lowest = step.middle - step.reach;
    step.factor = draws.uniform(step.middle == 0 ? lowest : std::max(lowest, 0.), step.middle + step.reach);
  }
  auto result = image;
  for (const auto i : order) {
    if (steps[i].reach != 0) result = steps[i].adjust(result, steps[i].factor);
  }
  return result;
}

}  // namespace tessera::vision
