// Linear maps along one dimension.
#pragma once

#include <vector>

#include "tessera/xla/graph/node.h"

namespace tessera::xla {

/// Each place of the result is a weighted sum of places of the argument: of `places[k]` with `weights[k]`, over all k.
struct Taps {
  std::vector<Sizes> places;
  std::vector<std::vector<double>> weights;  // if empty, all weights are 1
};

Value resampled(const Value& x, int64_t dimension, const Taps& taps);
/// Returns the gradient of resampled()'s argument, which has `size` places along the dimension.
Value resampled_gradient(const Value& gradient, int64_t dimension, int64_t size, const Taps& taps);

/// Adds up the values that have the same number in `places`. The dimensions of `places` are those of `values` from `dimension` on; one
/// dimension of `size` places replaces them.
Value put_along(const Value& values, int64_t dimension, int64_t size, const Value& places);

/// Returns taps for the means of windows that divide `size` places into `results` parts, as evenly as possible. Taps with the weight 0
/// repeat the place of another tap.
Taps adaptive_windows(int64_t size, int64_t results);

}  // namespace tessera::xla
