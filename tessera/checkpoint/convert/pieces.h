// Cuts boxes into pieces that fit into memory.
#pragma once

#include <c10/util/FunctionRef.h>

#include <algorithm>

#include "tessera/base/tensor_slice.h"

namespace tessera::checkpoint {

/// Calls `use` with pieces of the box that have at most `most` values each, in row-major order.
inline void for_each_piece(const TensorSlice& box, int64_t most, c10::function_ref<void(const TensorSlice&)> use) {
  const auto wide = std::ranges::find_if(box.sizes, [](int64_t size) { return size > 1; });
  if (box.numel() <= most || wide == box.sizes.end()) return use(box);
  const auto d = static_cast<size_t>(wide - box.sizes.begin());
  auto first = box, second = box;
  first.sizes[d] = box.sizes[d] / 2;
  second.offsets[d] += first.sizes[d];
  second.sizes[d] -= first.sizes[d];
  for_each_piece(first, most, use);
  for_each_piece(second, most, use);
}

}  // namespace tessera::checkpoint
