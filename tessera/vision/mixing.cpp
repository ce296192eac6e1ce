#include "tessera/vision/mixing.h"

#include <ATen/ATen.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::vision {
namespace {

/// Calls `mix` with rows of `all`, the rows before them, and the rows of `to`. The last row counts as the row before the first.
using MixRows = c10::function_ref<void(const at::Tensor& own, const at::Tensor& partners, at::Tensor to)>;
void with_partners(const at::Tensor& all, const at::Tensor& to, MixRows mix) {
  const auto others = all.size(0) - 1;
  mix(all.narrow(0, 0, 1), all.narrow(0, others, 1), to.narrow(0, 0, 1));
  mix(all.narrow(0, 1, others), all.narrow(0, 0, others), to.narrow(0, 1, others));
}

at::Tensor weighted(const at::Tensor& all, double lambda) {
  auto mixed = at::empty_like(all);
  with_partners(all, mixed,
                [&](const at::Tensor& own, const at::Tensor& partners, at::Tensor to) { at::lerp_out(to, partners, own, lambda); });
  return mixed;
}

at::Tensor mixed_labels(const at::Tensor& labels, int64_t classes, double lambda) {
  const auto largest = labels.max().item<int64_t>();
  if (largest >= classes) throw UsageError("the label {} can't be mixed as one of {} classes, which are counted from 0", largest, classes);
  const auto column = labels.unsqueeze(1);
  return weighted(at::zeros({labels.size(0), classes}, labels.options().dtype(at::kFloat))
                      .scatter_(1, column.clamp_min(0), column.ge(0).to(at::kFloat)),
                  lambda);
}

void check_batch(const at::Tensor& inputs, const at::Tensor& labels, double lambda) {
  if (inputs.dim() != 4 || !inputs.is_floating_point() || labels.dim() != 1 || labels.scalar_type() != at::kLong || labels.size(0) == 0 ||
      labels.size(0) != inputs.size(0)) {
    throw UsageError("inputs {} {} with labels {} {} can't be mixed; inputs are floats {{n, 3, height, width}}, and labels are int64 {{n}}",
                     c10::toString(inputs.scalar_type()), c10::str(inputs.sizes()), c10::toString(labels.scalar_type()),
                     c10::str(labels.sizes()));
  }
  if (!(lambda >= 0 && lambda <= 1)) throw UsageError("a sample can't keep {} of itself when samples are mixed; from 0 to 1", lambda);
}

double draw_normal(Draws& draws) {
  const double distance = std::sqrt(-2 * std::log(1 - draws.uniform(0, 1)));
  return distance * std::cos(draws.uniform(0, 2 * std::numbers::pi));
}

/// Returns the logarithm of a draw from the gamma distribution, by the method of Marsaglia and Tsang. Draws for small shapes would be too
/// small for a double.
double draw_log_gamma(double shape, Draws& draws) {
  if (shape < 1) {
    const double larger = draw_log_gamma(shape + 1, draws);
    return larger + std::log(1 - draws.uniform(0, 1)) / shape;
  }
  const double d = shape - 1. / 3, c = 1 / std::sqrt(9 * d);
  for (;;) {
    const double x = draw_normal(draws), root = 1 + c * x;
    const double u = 1 - draws.uniform(0, 1);
    if (root <= 0) continue;
    const double v = root * root * root;
    if (std::log(u) < 0.5 * x * x + d * (1 - v + std::log(v))) return std::log(d * v);
  }
}

}  // namespace

data::SeededFetch mix(data::SeededFetch fetch, const Mixing& options) {
  if (options.mixup < 0 || options.cutmix < 0) {
    throw UsageError("mixing with alphas of {} and {}: give numbers above 0, such as 0.2 for mixup and 1 for cutmix, or 0 for none",
                     options.mixup, options.cutmix);
  }
  if (options.mixup == 0 && options.cutmix == 0) return fetch;
  if (options.classes < 1) throw UsageError("mixing makes a target for each class; give Mixing::classes");
  return [fetch = std::move(fetch), options](std::span<const int64_t> numbers, std::span<const uint64_t> seeds) {
    auto batch = fetch(numbers, seeds);
    if (seeds.empty()) return batch;
    Draws draws(~seeds.front());  // other draws than the sample's own
    const bool cuts = options.cutmix > 0 && (options.mixup == 0 || draws.chance(0.5));
    const double lambda = draw_lambda(cuts ? options.cutmix : options.mixup, draws);
    const ImageSize size{.height = batch.inputs.size(2), .width = batch.inputs.size(3)};
    auto mixed = cuts ? cutmix(batch.inputs, batch.targets, options.classes, draw_cut(size, lambda, draws))
                      : mixup(batch.inputs, batch.targets, options.classes, lambda);
    batch.inputs = std::move(mixed.inputs);
    batch.targets = std::move(mixed.targets);
    return batch;
  };
}

Mixed mixup(const at::Tensor& inputs, const at::Tensor& labels, int64_t classes, double lambda) {
  check_batch(inputs, labels, lambda);
  return {.inputs = weighted(inputs, lambda), .targets = mixed_labels(labels, classes, lambda)};
}

Mixed cutmix(const at::Tensor& inputs, const at::Tensor& labels, int64_t classes, Box box) {
  const auto height = inputs.dim() == 4 ? inputs.size(2) : 0, width = inputs.dim() == 4 ? inputs.size(3) : 0;
  const double lambda = 1 - static_cast<double>(box.height * box.width) / static_cast<double>(height * width);
  check_batch(inputs, labels, lambda);
  if (box.top < 0 || box.left < 0 || box.height < 0 || box.width < 0 || box.top + box.height > height || box.left + box.width > width) {
    throw UsageError("images of {} by {} have no part of {} by {} at {}, {} to be exchanged", height, width, box.height, box.width, box.top,
                     box.left);
  }
  auto mixed = inputs.clone();
  const auto part = [&](const at::Tensor& images) { return images.narrow(2, box.top, box.height).narrow(3, box.left, box.width); };
  with_partners(part(inputs), part(mixed),
                [&](const at::Tensor& /*own*/, const at::Tensor& partners, at::Tensor to) { to.copy_(partners); });
  return {.inputs = std::move(mixed), .targets = mixed_labels(labels, classes, lambda)};
}

double draw_lambda(double alpha, Draws& draws) {
  if (!(alpha > 0)) throw UsageError("no share of a sample can be drawn from Beta({0}, {0}); alpha is larger than 0", alpha);
  const double own = draw_log_gamma(alpha, draws), of_partner = draw_log_gamma(alpha, draws);
  return 1 / (1 + std::exp(of_partner - own));
}

Box draw_cut(ImageSize image, double lambda, Draws& draws) {
  const auto across = draws.below(image.width), down = draws.below(image.height);
  const double half = 0.5 * std::sqrt(1 - lambda);
  const auto half_width = static_cast<int64_t>(half * static_cast<double>(image.width));
  const auto half_height = static_cast<int64_t>(half * static_cast<double>(image.height));
  const auto left = std::max<int64_t>(across - half_width, 0), right = std::min(across + half_width, image.width);
  const auto top = std::max<int64_t>(down - half_height, 0), bottom = std::min(down + half_height, image.height);
  return {.top = top, .left = left, .height = bottom - top, .width = right - left};
}

}  // namespace tessera::vision
