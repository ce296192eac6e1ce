#include "tessera/base/tensor_slice.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "tessera/base/error.h"

namespace tessera {
namespace {

/// The dimensions in order of decreasing stride.
std::vector<int64_t> memory_order(at::IntArrayRef strides) {
  std::vector<int64_t> order(strides.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater{}, [&](int64_t dim) { return strides[dim]; });
  return order;
}

std::vector<int64_t> permuted(at::IntArrayRef values, at::IntArrayRef order) {
  std::vector<int64_t> result;
  for (const auto dim : order) result.push_back(values[dim]);
  return result;
}

std::vector<int64_t> inverse(at::IntArrayRef order) {
  std::vector<int64_t> result(order.size());
  for (size_t i = 0; i < order.size(); i++) result[order[i]] = static_cast<int64_t>(i);
  return result;
}

}  // namespace

int64_t TensorSlice::numel() const {
  return c10::multiply_integers(sizes);
}

bool TensorSlice::fits() const {
  if (offsets.size() != shape.size() || sizes.size() != shape.size()) return false;
  for (size_t d = 0; d < shape.size(); d++) {
    if (offsets[d] < 0 || sizes[d] < 0 || sizes[d] > shape[d] || offsets[d] > shape[d] - sizes[d]) return false;
  }
  return true;
}

std::string to_string(const TensorSlice& slice) {
  std::vector<std::string> ranges;
  for (size_t d = 0; d < slice.sizes.size(); d++) {
    ranges.push_back(fmt::format("{}:{}", slice.offsets[d], slice.offsets[d] + slice.sizes[d]));
  }
  return fmt::format("[{}]", fmt::join(ranges, ", "));
}

TensorSlice whole_slice(at::IntArrayRef shape) {
  return {.shape = shape.vec(), .offsets = std::vector<int64_t>(shape.size(), 0), .sizes = shape.vec()};
}

std::optional<TensorSlice> intersection(const TensorSlice& one, const TensorSlice& other) {
  if (one.shape != other.shape) {
    throw UsageError("slices of tensors of different shapes, [{}] and [{}], can't be compared", joined(one.shape), joined(other.shape));
  }
  auto result = one;
  for (size_t d = 0; d < one.shape.size(); d++) {
    result.offsets[d] = std::max(one.offsets[d], other.offsets[d]);
    result.sizes[d] = std::min(one.offsets[d] + one.sizes[d], other.offsets[d] + other.sizes[d]) - result.offsets[d];
    if (result.sizes[d] <= 0) return std::nullopt;
  }
  return result;
}

std::vector<TensorSlice> difference(const TensorSlice& slice, const TensorSlice& taken) {
  const auto common = intersection(slice, taken);
  if (!common) return {slice};
  std::vector<TensorSlice> result;
  auto rest = slice;
  for (size_t d = 0; d < slice.shape.size(); d++) {
    const auto keep = [&](int64_t begin, int64_t end) {
      if (begin == end) return;
      result.push_back(rest);
      result.back().offsets[d] = begin;
      result.back().sizes[d] = end - begin;
    };
    keep(rest.offsets[d], common->offsets[d]);
    keep(common->offsets[d] + common->sizes[d], rest.offsets[d] + rest.sizes[d]);
    rest.offsets[d] = common->offsets[d];
    rest.sizes[d] = common->sizes[d];
  }
  return result;
}

at::Tensor view_of(const at::Tensor& whole, const TensorSlice& slice) {
  if (whole.sizes() != at::IntArrayRef(slice.shape)) {
    throw UsageError("a slice of a tensor of shape [{}] does not fit a tensor of shape [{}]", joined(slice.shape), joined(whole.sizes()));
  }
  auto view = whole;
  for (size_t d = 0; d < slice.shape.size(); d++) view = view.narrow(static_cast<int64_t>(d), slice.offsets[d], slice.sizes[d]);
  return view;
}

std::vector<TensorSlice> slices_of_range(at::IntArrayRef shape, int64_t begin, int64_t numel) {
  if (const auto all = c10::multiply_integers(shape); begin < 0 || numel < 0 || begin > all || numel > all - begin) {
    throw UsageError("a tensor of shape [{}] does not have {} values from index {} on", joined(shape), numel, begin);
  }
  std::vector<TensorSlice> result;
  for (int64_t taken = 0; numel > 0; begin += taken, numel -= taken) {
    TensorSlice slice{.shape = shape.vec(), .offsets = std::vector<int64_t>(shape.size()), .sizes = shape.vec()};
    for (auto [d, index] = std::pair(shape.size(), begin); d-- > 0; index /= shape[d]) slice.offsets[d] = index % shape[d];
    // Finds the outermost dimension of which a row begins at `begin` and has at most `numel` values. The slice takes as many of these rows
    // as fit.
    int64_t row = c10::multiply_integers(shape);
    taken = 1;
    for (size_t d = 0; d < shape.size(); d++) {
      row /= shape[d];
      if (begin % row != 0 || numel < row) {
        slice.sizes[d] = 1;
        continue;
      }
      slice.sizes[d] = std::min(numel / row, shape[d] - slice.offsets[d]);
      taken = slice.sizes[d] * row;
      break;
    }
    result.push_back(std::move(slice));
  }
  return result;
}

std::vector<TensorSlice> slices_of_range(at::IntArrayRef shape, at::IntArrayRef strides, int64_t begin, int64_t numel) {
  const auto order = memory_order(strides);
  const auto back = inverse(order);
  auto slices = slices_of_range(permuted(shape, order), begin, numel);
  for (auto& slice : slices) {
    slice = {.shape = shape.vec(), .offsets = permuted(slice.offsets, back), .sizes = permuted(slice.sizes, back)};
  }
  return slices;
}

std::vector<at::Tensor> views_of_slices(const at::Tensor& flat, std::span<const TensorSlice> slices, at::IntArrayRef strides) {
  const auto order = memory_order(strides);
  const auto back = inverse(order);
  std::vector<at::Tensor> result;
  int64_t begin = 0;
  for (const auto& slice : slices) {
    result.push_back(flat.narrow(0, begin, slice.numel()).view(permuted(slice.sizes, order)).permute(back));
    begin += slice.numel();
  }
  return result;
}

}  // namespace tessera
