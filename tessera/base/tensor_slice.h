// Boxes inside a tensor. They describe where a rank's part of a tensor lies, independently of how the tensor was sharded.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace tessera {

/// A range of a tensor's values, counted in the order in which they lie in memory.
struct ValueRange {
  int64_t begin = 0, numel = 0;
};

struct TensorSlice {
  std::vector<int64_t> shape;  // the shape of the full tensor
  std::vector<int64_t> offsets, sizes;

  int64_t numel() const;
  /// Whether the slice lies inside the shape. A slice that was read from a file may not.
  bool fits() const;
  bool operator==(const TensorSlice&) const = default;
};

/// "[0:2, 3:5]"
std::string to_string(const TensorSlice& slice);

TensorSlice whole_slice(at::IntArrayRef shape);

/// The values that both slices have, or nothing if there are none. Throws UsageError if the shapes differ.
std::optional<TensorSlice> intersection(const TensorSlice& one, const TensorSlice& other);
/// The values of `slice` that are not in `taken`, as slices that do not overlap.
std::vector<TensorSlice> difference(const TensorSlice& slice, const TensorSlice& taken);

/// The slice as a view of the full tensor. Throws UsageError if the tensor does not have the slice's shape.
at::Tensor view_of(const at::Tensor& whole, const TensorSlice& slice);

/// The slices, in order, that cover `numel` values from `begin` on in row-major order: at most 2 * dimensions - 1. Throws UsageError if the
/// tensor has fewer values.
std::vector<TensorSlice> slices_of_range(at::IntArrayRef shape, int64_t begin, int64_t numel);
/// Like the function above, but counts values in the memory order of a dense tensor with these strides.
std::vector<TensorSlice> slices_of_range(at::IntArrayRef shape, at::IntArrayRef strides, int64_t begin, int64_t numel);

/// Views into a flat tensor that holds the slices one after the other, each in the memory order of these strides. Each view has the sizes
/// of its slice.
std::vector<at::Tensor> views_of_slices(const at::Tensor& flat, std::span<const TensorSlice> slices, at::IntArrayRef strides);

}  // namespace tessera
