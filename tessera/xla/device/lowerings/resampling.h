// Linear maps along one dimension.
#pragma once

#include <vector>

#include "tessera/xla/graph/node.h"

namespace tessera::xla {

/// Each place of the result is a weighted sum of places of the argument: of `places[k]` with `weights[k]`, over all k.
struct Taps {
  std::vector<Sizes> places;
  std::vector<std::vector<double>> weights;  // all 1 if there are none
};

Value resampled(const Value& x, int64_t dimension, const Taps& taps);
/// The gradient of an argument that has `size` places along the dimension.
Value resampled_gradient(const Value& gradient, int64_t dimension, int64_t size, const Taps& taps);

/// Adds up values that go to one place: the dimensions from `dimension` on, as many as `places` has, become one dimension of `size` places.
Value put_along(const Value& values, int64_t dimension, int64_t size, const Value& places);

/// The means of windows that divide `size` places into `results` parts, as evenly as possible. Taps with the weight 0 repeat the place of
/// another tap.
Taps adaptive_windows(int64_t size, int64_t results);

}  // namespace tessera::xla
