// Prefix combinations along a dimension: each place becomes what all places up to it combine to.
#pragma once

#include <functional>

#include "tessera/xla/graph/ops.h"

namespace tessera::xla::hlo {

/// What two neighbouring stretches of a dimension are together. It must be associative. Several values may go along with each other.
using CombineStretches = std::function<std::vector<Value>(const std::vector<Value>& earlier, const std::vector<Value>& later)>;

/// In as many steps as the size has bits, each of which combines all places with those twice as far before. `fill` changes nothing.
std::vector<Value> scan(std::vector<Value> values, int64_t dimension, const std::vector<Value>& fill, const CombineStretches& combine);
/// Of sums or products.
Value running(const Value& x, int64_t dimension, Combine combine);

/// All places moved up by some, or down if negative; `fill` comes in.
Value shifted(const Value& x, int64_t dimension, int64_t by, const Value& fill);

}  // namespace tessera::xla::hlo
