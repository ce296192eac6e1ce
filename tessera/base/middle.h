// The median of numbers.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

namespace tessera {

/// The two numbers in the middle, the lesser one first; of an odd number of numbers, one number twice. Zeros if there is none.
inline std::pair<double, double> middle_of(std::vector<double> values) {
  if (values.empty()) return {};
  std::ranges::sort(values);
  return {values[(values.size() - 1) / 2], values[values.size() / 2]};
}

}  // namespace tessera
