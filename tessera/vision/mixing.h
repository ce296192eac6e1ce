// mixup and cutmix: mixes the samples of training batches in a Loader's workers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "tessera/data/loader.h"
#include "tessera/vision/draws.h"
#include "tessera/vision/image.h"

namespace tessera::vision {

/// With both, each batch is mixed in one of the two ways, with equal probability.
struct Mixing {
  double mixup = 0;   // the alpha of mixup's Beta(alpha, alpha), such as 0.2; 0 for none
  double cutmix = 0;  // that of cutmix, such as 1; 0 for none
  int64_t classes = 0;
};

/// Mixes the samples of each batch that `fetch` returns. Targets become floats {n, classes}, so LoaderOptions::target_of_repeats can be 0.
/// Draws come from the seed of the first sample. A sample is mixed with one of its own process, so the pairs depend on the number of
/// processes. Without mixup and cutmix it returns `fetch`.
data::SeededFetch mix(data::SeededFetch fetch, const Mixing& options);

/// A batch whose samples are mixed with their partners: each with the sample before it, the first with the last.
struct Mixed {
  at::Tensor inputs;
  at::Tensor targets;  // float {n, classes}
};
/// inputs: float {n, 3, height, width}; labels: int64 {n}. A negative label, such as that of a damaged picture, becomes a row of zeros.
/// `lambda` is the share of itself that a sample keeps.
Mixed mixup(const at::Tensor& inputs, const at::Tensor& labels, int64_t classes, double lambda);
/// The box comes from the partner, and targets are mixed in proportion to its area.
Mixed cutmix(const at::Tensor& inputs, const at::Tensor& labels, int64_t classes, Box box);
/// Draws from Beta(alpha, alpha).
double draw_lambda(double alpha, Draws& draws);
/// Draws a box of about 1 - lambda of the image's area around a random point, cut off at the image's edges.
Box draw_cut(ImageSize image, double lambda, Draws& draws);

}  // namespace tessera::vision
