// Prefix scans: each place of a dimension becomes the combination of all places up to it.
#pragma once

#include <functional>

#include "tessera/xla/graph/ops.h"

namespace tessera::xla::hlo {

/// Combines two neighbouring stretches of a dimension; must be associative. A stretch may have several values.
using CombineStretches = std::function<std::vector<Value>(const std::vector<Value>& earlier, const std::vector<Value>& later)>;

/// Scans in about log2(size) steps: step n combines every place with the place 2^n before it. `fill` has the neutral element of each value.
std::vector<Value> scan(std::vector<Value> values, int64_t dimension, const std::vector<Value>& fill, const CombineStretches& combine);
/// Running sums or products.
Value running(const Value& x, int64_t dimension, Combine combine);

/// Moves all elements `by` places up, or down if `by` is negative, and puts `fill` into the places that become free.
Value shifted(const Value& x, int64_t dimension, int64_t by, const Value& fill);

}  // namespace tessera::xla::hlo
