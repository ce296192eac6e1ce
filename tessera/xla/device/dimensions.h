// Helpers for the dimensions that operators take as arguments.
#pragma once

#include <ATen/WrapDimUtils.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "tessera/xla/device/kernels.h"
#include "tessera/xla/graph/arithmetic.h"

namespace tessera::xla {

inline Sizes all_dimensions(int64_t rank) {
  Sizes all(static_cast<size_t>(rank));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

inline Sizes all_but(int64_t rank, int64_t left_out) {
  auto others = all_dimensions(rank);
  others.erase(others.begin() + left_out);
  return others;
}

/// Returns one number for each of `count` dimensions. A single number in `given` is for all dimensions; if there is none, each gets
/// `otherwise`.
inline Sizes one_for_each(const Sizes& given, size_t count, int64_t otherwise) {
  return given.size() == count ? given : Sizes(count, given.empty() ? otherwise : given[0]);
}

/// Returns the dimension counted from 0, also if `dimension` is negative and counts from the end. Throws if there is no such dimension; a
/// scalar counts as having one.
inline int64_t wrapped(int64_t dimension, int64_t rank) {
  return at::maybe_wrap_dim(dimension, rank);
}

/// Returns the dimensions counted from 0, and sorted. Throws if one is named twice.
inline Sizes wrapped(Sizes named, int64_t rank) {
  at::maybe_wrap_dims(named, rank);
  std::ranges::sort(named);
  const auto twice = std::ranges::adjacent_find(named);
  TORCH_CHECK(twice == named.end(), "dim ", *twice, " appears multiple times in the list of dims");
  return named;
}

/// The index of an argument, or nothing if the operator has no such argument.
using Place = std::optional<size_t>;

/// Returns the dimensions that the argument at `place` names, counted from 0. Returns all dimensions if it names none, or if there is no
/// such argument.
inline Sizes dimensions(const Call& call, Place place, int64_t rank) {
  const auto named = wrapped(place && call.has(*place) ? call.integers(*place) : Sizes{}, rank);
  return named.empty() || rank == 0 ? all_dimensions(rank) : named;
}

inline Sizes kept_sizes(Sizes sizes, const Sizes& reduced) {
  for (const auto d : reduced) sizes[static_cast<size_t>(d)] = 1;
  return sizes;
}

/// Broadcasts a reduction of `x` to the shape of `x`.
inline Value spread(const Value& reduced, const Value& x, const Sizes& over_dimensions) {
  return expand(reshape(reduced, kept_sizes(x.sizes(), over_dimensions)), x.sizes());
}

inline int64_t count_of(const Value& x, const Sizes& dimensions) {
  int64_t count = 1;
  for (const auto d : dimensions) count *= x.size(d);
  return count;
}

inline Value mean_of(const Value& x, const Sizes& dimensions) {
  const auto sum = hlo::sum(x, dimensions);
  return sum / count_of(x, dimensions);
}

inline Value smallest_of(const Value& x, const Sizes& dimensions) {
  return reduce(x, Combine::Min, hlo::highest(x.element()), dimensions);
}

/// Returns `x` or, if `x` is a scalar, a list of that one element.
inline Value with_a_dimension(const Value& x) {
  return x.rank() ? x : reshape(x, {1});
}

}  // namespace tessera::xla
