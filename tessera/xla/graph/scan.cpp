#include "tessera/xla/graph/scan.h"

namespace tessera::xla::hlo {

Value shifted(const Value& x, int64_t dimension, int64_t by, const Value& fill) {
  const auto d = static_cast<size_t>(dimension);
  const auto size = x.size(d), distance = std::abs(by);
  const auto kept = by > 0 ? slice(x, dimension, 0, size - distance) : slice(x, dimension, distance, size);
  const Sizes none(x.rank(), 0);
  Sizes low = none, high = none;
  (by > 0 ? low : high)[d] = distance;
  return pad(kept, fill, low, high, none);
}

std::vector<Value> scan(std::vector<Value> values, int64_t dimension, const std::vector<Value>& fill, const CombineStretches& combine) {
  const auto size = values[0].size(dimension);
  for (int64_t distance = 1; distance < size; distance *= 2) {
    std::vector<Value> earlier;
    for (size_t i = 0; i < values.size(); i++) earlier.push_back(shifted(values[i], dimension, distance, fill[i]));
    values = combine(earlier, values);
  }
  return values;
}

Value running(const Value& x, int64_t dimension, Combine combine) {
  const bool is_sum = combine == Combine::Add;
  return scan({x}, dimension, {constant(int64_t{!is_sum}, x.element())}, [&](const auto& earlier, const auto& later) {
    return std::vector{binary(is_sum ? "add" : "multiply", earlier[0], later[0])};
  })[0];
}

}  // namespace tessera::xla::hlo
