// The memory of tensors, as bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <span>

namespace tessera {

inline std::span<std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

/// At most `most` bytes from `begin` on; fewer, or none, at the end.
template <class Span>
Span byte_range(Span bytes, size_t begin, size_t most) {
  const auto rest = bytes.subspan(std::min(begin, bytes.size()));
  return rest.first(std::min(most, rest.size()));
}

/// Part `index` of the bytes, divided into `parts` equal parts.
inline std::span<std::byte> part_of(std::span<std::byte> all, size_t index, size_t parts) {
  return all.subspan(index * (all.size() / parts), all.size() / parts);
}

}  // namespace tessera
