// Boxes inside a tensor, which say where a rank's part of it belongs without a word about how the tensor was sharded.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace tessera {

struct TensorSlice {
  std::vector<int64_t> shape;  // of the whole tensor
  std::vector<int64_t> offsets, sizes;

  int64_t numel() const;
  /// Whether it lies inside the shape; what comes from a file may not.
  bool fits() const;
  bool operator==(const TensorSlice&) const = default;
};

/// [0:2, 3:5]
std::string to_string(const TensorSlice& slice);

TensorSlice whole_slice(at::IntArrayRef shape);

/// Nothing where the two have no value in common.
std::optional<TensorSlice> intersection(const TensorSlice& one, const TensorSlice& other);
/// What is left of `slice` without `taken`, in slices that do not overlap.
std::vector<TensorSlice> difference(const TensorSlice& slice, const TensorSlice& taken);

/// The slice as a view of the whole tensor.
at::Tensor view_of(const at::Tensor& whole, const TensorSlice& slice);

/// The slices, in order and at most 2 * dimensions - 1 of them, that make up `numel` values from `begin` on in row-major order.
std::vector<TensorSlice> slices_of_range(at::IntArrayRef shape, int64_t begin, int64_t numel);
/// The same in the order in which the values of a dense tensor with these strides lie in memory.
std::vector<TensorSlice> slices_of_range(at::IntArrayRef shape, at::IntArrayRef strides, int64_t begin, int64_t numel);

/// For a flat tensor that has the values of the slices one after the other, each in the memory order of these strides: the values of each
/// slice as a view of the slice's sizes.
std::vector<at::Tensor> views_of_slices(const at::Tensor& flat, std::span<const TensorSlice> slices, at::IntArrayRef strides);

}  // namespace tessera
