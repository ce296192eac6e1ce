// Functions that add StableHLO operations to the graph. Each returns a value whose type is known; nothing is computed yet.
#pragma once

#include <c10/util/ArrayRef.h>

#include <optional>
#include <span>

#include "tessera/xla/graph/node.h"

namespace tessera::xla::hlo {

using IntList = c10::IntArrayRef;

/// Returns a number that is an argument of the program, so that another learning rate, even 0 or 1, does not need another program. Numbers
/// of types that are not floating-point are constants in the program's text.
Value scalar(double number, at::ScalarType element);
/// Returns a number that is a constant in the program's text.
Value constant(double number, at::ScalarType element);
Value constant(int64_t number, at::ScalarType element);
inline Value constant(int number, at::ScalarType element) {
  return constant(int64_t{number}, element);
}
/// Returns a list of numbers that is a constant in the program's text.
Value constants(IntList numbers, at::ScalarType element);
Value constants(const std::vector<double>& numbers, at::ScalarType element);
Value full(double number, const Type& type);
/// Return the lowest and the highest value of the type; infinities if the type has them.
Value lowest(at::ScalarType element);
Value highest(at::ScalarType element);
Value iota(const Type& type, int64_t dimension);

Value unary(const char* operation, const Value& x);
Value binary(const char* operation, const Value& a, const Value& b);
/// StableHLO's compare_type for an element type. Without a compare_type, an old compiler compares constant integers as unsigned.
const char* comparison_type(at::ScalarType element);
/// `direction` is "EQ", "NE", "LT", "LE", "GT" or "GE".
Value compare(const char* direction, const Value& a, const Value& b);
Value select(const Value& condition, const Value& yes, const Value& no);
Value convert(const Value& x, at::ScalarType element);
/// Reinterprets the bits. If element sizes differ, the last dimension grows or shrinks by their ratio. A complex number counts as two reals.
Value bitcast(const Value& x, at::ScalarType element);
Value conjugate(const Value& x);

Value reshape(const Value& x, IntList sizes);
Value transpose(const Value& x, IntList permutation);
/// Returns the permutation that undoes this one.
Sizes inverse(const Sizes& permutation);
Value reverse(const Value& x, IntList dimensions);
/// Broadcasts `x` so that its dimension i becomes dimension `dimensions[i]` of the result.
Value broadcast(const Value& x, IntList sizes, IntList dimensions);
/// Broadcasts by libtorch's rules: dimensions are matched from the last, those of size 1 are repeated.
Value expand(const Value& x, IntList sizes);
Value slice(const Value& x, IntList start, IntList limit, IntList strides);
Value slice(const Value& x, int64_t dimension, int64_t start, int64_t limit, int64_t step = 1);
Value pad(const Value& x, const Value& fill, IntList low, IntList high, IntList interior);
Value concatenate(std::span<const Value> parts, int64_t dimension);
/// Returns the part of `x` that begins at `start` and has these sizes. If it would reach over the end of `x`, it begins earlier.
Value dynamic_slice(const Value& x, std::span<const Value> start, IntList sizes);
Value dynamic_update_slice(const Value& x, const Value& update, std::span<const Value> start);

/// Reduces the dimensions away, beginning with the value `start`.
Value reduce(const Value& x, Combine combine, const Value& start, IntList dimensions);
Value sum(const Value& x, IntList dimensions);
Value maximum(const Value& x, IntList dimensions);

struct DotDimensions {
  Sizes left_batch, right_batch, left_contracting, right_contracting;
};
/// The result has the batch dimensions first, then the other dimensions of `a` that are not contracted, then those of `b`.
Value dot(const Value& a, const Value& b, const DotDimensions& dimensions, std::optional<at::ScalarType> result = {});

struct Window {
  Sizes size, stride, padding_low, padding_high, base_dilation, dilation;
};
/// `names` gives the dimensions of input, filter and result in StableHLO's form: "[b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1]".
Value convolution(const Value& input, const Value& filter, const Type& result, const std::string& names, const Window& window,
                  int64_t feature_groups = 1, int64_t batch_groups = 1);
Value reduce_window(const Value& x, Combine combine, const Value& start, const Window& window);
/// Gathers whole rows along a dimension by their indices; the dimensions of `indices` replace that dimension.
Value take(const Value& x, const Value& indices, int64_t dimension);
/// Scatters rows of `updates` into dimension 0 of `x` by their indices; `combine` joins each row with the row of `x` at its index.
Value put(const Value& x, const Value& indices, const Value& updates, Combine combine);

enum class Order { Ascending, Descending };
/// Returns the sorted values and their indices in `x`.
std::pair<Value, Value> sort(const Value& x, int64_t dimension, Order order);

/// Returns the next state and random bits.
std::pair<Value, Value> random_bits(const Value& state, const Type& type, const char* algorithm);

/// The groups of a collective: lists of equal length, each replica in exactly one.
using ReplicaGroups = std::vector<std::vector<int>>;

/// Concatenates the lists of a group.
Value all_gather(const Value& list, const ReplicaGroups& groups);
Value all_reduce(const Value& x, Combine combine, const ReplicaGroups& groups);
/// Returns each replica's part of the reduced list.
Value reduce_scatter(const Value& list, Combine combine, const ReplicaGroups& groups);
Value replica_number();

/// Passes the values through one optimization barrier: no result is available before all values are computed.
std::vector<Value> barrier(std::span<const Value> values);

}  // namespace tessera::xla::hlo
