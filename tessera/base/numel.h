// The number of values of a shape that comes from outside, such as from a file.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>

namespace tessera {

/// The product of the sizes and of `factor`. Nothing if a size is negative or the product overflows, even if a size of 0 makes the whole
/// product 0, because libtorch could not compute the strides.
inline std::optional<int64_t> checked_numel(std::span<const int64_t> sizes, int64_t factor = 1) {
  bool empty = false;
  for (const auto size : sizes) {
    empty |= size == 0;
    if (size < 0 || __builtin_mul_overflow(factor, std::max<int64_t>(size, 1), &factor)) return std::nullopt;
  }
  return empty ? 0 : factor;
}

}  // namespace tessera
