// StableHLO's operations as functions of values. Each knows the type of its result; none computes.
#pragma once

#include <c10/util/ArrayRef.h>

#include <optional>
#include <span>
#include <variant>

#include "tessera/xla/graph/node.h"

namespace tessera::xla::hlo {

using IntList = c10::IntArrayRef;

/// A number that is an argument of the program, so that another learning rate needs no other program, also where it is 0 or 1. Of types
/// of whole numbers the program's text has the value.
Value scalar(double number, at::ScalarType element);
/// In the program's text, whatever it is.
Value constant(double number, at::ScalarType element);
Value constant(int64_t number, at::ScalarType element);
/// A list of numbers, in the program's text.
Value constants(IntList numbers, at::ScalarType element);
Value constants(const std::vector<double>& numbers, at::ScalarType element);
Value full(double number, const Type& type);
/// The lowest and the highest value of the type, infinite where it has infinities.
Value lowest(at::ScalarType element);
Value highest(at::ScalarType element);
Value iota(const Type& type, int64_t dimension);

Value unary(const char* operation, const Value& x);
Value binary(const char* operation, const Value& a, const Value& b);
/// How StableHLO compares numbers of a type. Unsaid, an old compiler takes whole numbers that it knows for unsigned ones.
const char* comparison_type(at::ScalarType element);
/// "EQ", "NE", "LT", "LE", "GT", "GE".
Value compare(const char* direction, const Value& a, const Value& b);
Value select(const Value& condition, const Value& yes, const Value& no);
Value convert(const Value& x, at::ScalarType element);
/// The same bits. Where the elements' sizes differ, the last dimension is as many times longer or shorter; complex numbers are pairs.
Value bitcast(const Value& x, at::ScalarType element);
Value conjugate(const Value& x);

Value reshape(const Value& x, IntList sizes);
Value transpose(const Value& x, IntList permutation);
/// What undoes a permutation.
Sizes inverse(const Sizes& permutation);
Value reverse(const Value& x, IntList dimensions);
/// Dimension i of `x` becomes `dimensions[i]` of the result.
Value broadcast(const Value& x, IntList sizes, IntList dimensions);
/// By libtorch's rules: dimensions are matched from the last, those of size 1 are repeated.
Value expand(const Value& x, IntList sizes);
Value slice(const Value& x, IntList start, IntList limit, IntList strides);
Value slice(const Value& x, int64_t dimension, int64_t start, int64_t limit, int64_t step = 1);
Value pad(const Value& x, const Value& fill, IntList low, IntList high, IntList interior);
Value concatenate(std::span<const Value> parts, int64_t dimension);
/// The part of these sizes that begins there, moved inwards where it would reach over the end.
Value dynamic_slice(const Value& x, std::span<const Value> start, IntList sizes);
Value dynamic_update_slice(const Value& x, const Value& update, std::span<const Value> start);

/// `start` is what the reduction begins with; the dimensions go.
Value reduce(const Value& x, Combine combine, const Value& start, IntList dimensions);
Value sum(const Value& x, IntList dimensions);
Value maximum(const Value& x, IntList dimensions);

struct DotDimensions {
  Sizes left_batch, right_batch, left_contracting, right_contracting;
};
/// Batch dimensions come first in the result, then what is left of `a`, then of `b`.
Value dot(const Value& a, const Value& b, const DotDimensions& dimensions, std::optional<at::ScalarType> result = {});

struct Window {
  Sizes size, stride, padding_low, padding_high, base_dilation, dilation;
};
/// Names of dimensions as StableHLO writes them: "[b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1]".
Value convolution(const Value& input, const Value& filter, const Type& result, const std::string& names, const Window& window,
                  int64_t feature_groups = 1, int64_t batch_groups = 1);
Value reduce_window(const Value& x, Combine combine, const Value& start, const Window& window);
/// Whole rows of dimension `dimension`, by numbers that have the shape `indices` has.
Value take(const Value& x, const Value& indices, int64_t dimension);
/// Elements of a list by the numbers in `indices`, of the shape of `indices`.
Value take_elements(const Value& list, const Value& indices);
/// `combine` of what `x` has at each place of dimension 0 and of the rows of `updates` with that number.
Value put(const Value& x, const Value& indices, const Value& updates, Combine combine);
/// With the attributes that StableHLO's gather and scatter take.
Value gather(const Value& x, const Value& indices, const Type& result, const std::string& attributes);
Value scatter(const Value& x, const Value& indices, const Value& updates, Combine combine, const std::string& attributes);

enum class Order { Ascending, Descending };
/// The values in order, and where each of them was.
std::pair<Value, Value> sort(const Value& x, int64_t dimension, Order order);

/// The next state, and random bits.
std::pair<Value, Value> random_bits(const Value& state, const Type& type, const char* algorithm);

/// The same values, of which none is computed before all are there.
std::vector<Value> barrier(std::span<const Value> values);

}  // namespace tessera::xla::hlo
