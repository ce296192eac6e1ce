#include "tessera/xla/graph/ops.h"

#include <ATen/Context.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "tessera/xla/pjrt/element_types.h"

namespace tessera::xla::hlo {
namespace {

using Operands = c10::SmallVector<Value, 3>;
using Results = c10::SmallVector<Type, 1>;

using Numbers = c10::SmallVector<int64_t, 1>;

Value make(const char* name, Operands operands, std::string attributes, Type type, Combine combine = Combine::None, Numbers numbers = {}) {
  return Value(
      c10::make_intrusive<Node>(name, std::move(attributes), std::move(operands), Results{std::move(type)}, combine, std::move(numbers)));
}

std::string array(IntList numbers) {
  return numbers.empty() ? "array<i64>" : fmt::format("array<i64: {}>", fmt::join(numbers, ", "));
}

std::string list(IntList numbers) {
  return fmt::format("[{}]", fmt::join(numbers, ", "));
}

Sizes or_all(const Sizes& sizes, size_t count, int64_t otherwise) {
  return sizes.empty() ? Sizes(count, otherwise) : sizes;
}

std::string padding_of(const Sizes& low, const Sizes& high) {
  std::string pairs;
  for (size_t i = 0; i < low.size(); i++) pairs += fmt::format("{}[{}, {}]", i ? ", " : "", low[i], high[i]);
  return fmt::format("dense<[{}]> : tensor<{}x2xi64>", pairs, low.size());
}

/// Keeps the lowest bits of a number, as many as the type has, as libtorch does when it converts integers.
int64_t kept(int64_t number, at::ScalarType element) {
  const auto unused = 64 - 8 * static_cast<int>(c10::elementSize(element));
  const auto bits = static_cast<uint64_t>(number) << unused;
  return c10::isSignedType(element) ? static_cast<int64_t>(bits) >> unused : static_cast<int64_t>(bits >> unused);
}

std::string literal(int64_t number, at::ScalarType element) {
  if (element == at::kBool) return number != 0 ? "true" : "false";
  const auto its = kept(number, element);
  return c10::isSignedType(element) ? fmt::format("{}", its) : fmt::format("{}", static_cast<uint64_t>(its));
}

/// Truncates towards zero, and saturates at the ends of int64; NaN gives 0.
int64_t whole(double number) {
  constexpr auto kEnd = 9223372036854775808.0;  // 2^63
  if (std::isnan(number)) return 0;
  if (number >= kEnd) return std::numeric_limits<int64_t>::max();
  return number < -kEnd ? std::numeric_limits<int64_t>::min() : static_cast<int64_t>(number);
}

std::string literal(double number, at::ScalarType element) {
  if (element == at::kBool) return number != 0 ? "true" : "false";
  if (c10::isComplexType(element))
    return fmt::format("({0}, {1})", literal(number, c10::toRealValueType(element)), literal(0.0, c10::toRealValueType(element)));
  if (!c10::isFloatingType(element)) return literal(whole(number), element);
  if (std::isfinite(number)) return fmt::format("{:.17e}", number);
  // Infinities and NaN have no decimal form: the text has their bits.
  const bool negative = std::signbit(number) && !std::isnan(number);
  switch (element) {
    case at::kDouble:
      return std::isnan(number) ? "0x7FF8000000000000" : negative ? "0xFFF0000000000000" : "0x7FF0000000000000";
    case at::kHalf:
      return std::isnan(number) ? "0x7E00" : negative ? "0xFC00" : "0x7C00";
    case at::kBFloat16:
      return std::isnan(number) ? "0x7FC0" : negative ? "0xFF80" : "0x7F80";
    default:
      return std::isnan(number) ? "0x7FC00000" : negative ? "0xFF800000" : "0x7F800000";
  }
}

Value constant_of(const std::string& text, at::ScalarType element, Numbers numbers) {
  Type type{element, {}};
  auto attributes = fmt::format("value = dense<{}> : {}", text, text_of(type));
  return make("constant", {}, std::move(attributes), std::move(type), Combine::None, std::move(numbers));
}

std::string window_of(const Window& window) {
  const auto count = window.size.size();
  return fmt::format("base_dilations = {}, padding = {}, window_dilations = {}, window_dimensions = {}, window_strides = {}",
                     array(or_all(window.base_dilation, count, 1)),
                     padding_of(or_all(window.padding_low, count, 0), or_all(window.padding_high, count, 0)),
                     array(or_all(window.dilation, count, 1)), array(window.size), array(or_all(window.stride, count, 1)));
}

}  // namespace

Value constant(double number, at::ScalarType element) {
  if (c10::isIntegralType(element, false)) return constant(whole(number), element);
  return constant_of(literal(number, element), element, c10::isFloatingType(element) ? Numbers{std::bit_cast<int64_t>(number)} : Numbers());
}

Value constant(int64_t number, at::ScalarType element) {
  if (!c10::isIntegralType(element, true)) return constant(static_cast<double>(number), element);
  return constant_of(literal(number, element), element, element == at::kBool ? Numbers() : Numbers{kept(number, element)});
}

namespace {

template <class Number>
Value list_of(std::span<const Number> numbers, at::ScalarType element) {
  Type type{element, {static_cast<int64_t>(numbers.size())}};
  std::string text;
  for (const auto number : numbers) text += (text.empty() ? "" : ", ") + literal(number, element);
  auto attributes = fmt::format("value = dense<[{}]> : {}", text, text_of(type));
  return make("constant", {}, std::move(attributes), std::move(type));
}

}  // namespace

Value constants(IntList numbers, at::ScalarType element) {
  return list_of(std::span(numbers.data(), numbers.size()), element);
}

Value constants(const std::vector<double>& numbers, at::ScalarType element) {
  return list_of(std::span(numbers), element);
}

Value scalar(double number, at::ScalarType element) {
  if (!c10::isFloatingType(element)) return constant(number, element);
  const auto wide = element == at::kDouble ? at::kDouble : at::kFloat;
  return convert(Value(c10::make_intrusive<Node>(number, wide)), element);
}

Value full(double number, const Type& type) {
  return broadcast(scalar(number, type.element), type.sizes, {});
}

Value lowest(at::ScalarType element) {
  if (c10::isFloatingType(element)) return constant(-std::numeric_limits<double>::infinity(), element);
  if (element == at::kBool || element == at::kByte) return constant(0, element);
  const auto bits = static_cast<int>(c10::elementSize(element)) * 8;
  return constant(std::numeric_limits<int64_t>::min() >> (64 - bits), element);
}

Value highest(at::ScalarType element) {
  if (c10::isFloatingType(element)) return constant(std::numeric_limits<double>::infinity(), element);
  if (element == at::kBool) return constant(1, element);
  if (element == at::kByte) return constant(255, element);
  const auto bits = static_cast<int>(c10::elementSize(element)) * 8;
  return constant(std::numeric_limits<int64_t>::max() >> (64 - bits), element);
}

Value iota(const Type& type, int64_t dimension) {
  return make("iota", {}, fmt::format("iota_dimension = {} : i64", dimension), type);
}

Value unary(const char* operation, const Value& x) {
  return make(operation, {x}, {}, x.type());
}

Value binary(const char* operation, const Value& a, const Value& b) {
  return make(operation, {a, b}, {}, a.type());
}

const char* comparison_type(at::ScalarType element) {
  return !c10::isIntegralType(element, true) ? "FLOAT" : c10::isSignedType(element) ? "SIGNED" : "UNSIGNED";
}

Value compare(const char* direction, const Value& a, const Value& b) {
  auto attributes = fmt::format("compare_type = #stablehlo<comparison_type {}>, comparison_direction = #stablehlo<comparison_direction {}>",
                                comparison_type(a.element()), direction);
  return make("compare", {a, b}, std::move(attributes), {at::kBool, a.sizes()});
}

Value select(const Value& condition, const Value& yes, const Value& no) {
  return make("select", {condition, yes, no}, {}, yes.type());
}

Value convert(const Value& x, at::ScalarType element) {
  if (x.element() == element) return x;
  // XLA's conversion to i1 takes the lowest bit; libtorch's asks whether the number is zero.
  if (element == at::kBool) return compare("NE", x, broadcast(constant(0, x.element()), x.sizes(), {}));
  return make("convert", {x}, {}, {element, x.sizes()});
}

namespace {

Value real_part(const Value& x) {
  return make("real", {x}, {}, {c10::toRealValueType(x.element()), x.sizes()});
}
Value imaginary_part(const Value& x) {
  return make("imag", {x}, {}, {c10::toRealValueType(x.element()), x.sizes()});
}
Value complex_number(const Value& real, const Value& imaginary) {
  return make("complex", {real, imaginary}, {}, {c10::toComplexType(real.element()), real.sizes()});
}

Value as_pairs(const Value& x) {
  auto sizes = x.sizes();
  const auto d = x.rank();
  sizes.push_back(1);
  const Value parts[] = {reshape(real_part(x), sizes), reshape(imaginary_part(x), sizes)};
  sizes = x.sizes();
  sizes.back() *= 2;
  return reshape(concatenate(parts, d), sizes);
}

Value from_pairs(const Value& x) {
  auto sizes = x.sizes();
  const auto d = x.rank();
  sizes.back() /= 2;
  auto split = sizes;
  split.push_back(2);
  const auto pairs = reshape(x, split);
  return complex_number(reshape(slice(pairs, d, 0, 1), sizes), reshape(slice(pairs, d, 1, 2), sizes));
}

}  // namespace

Value conjugate(const Value& x) {
  return complex_number(real_part(x), unary("negate", imaginary_part(x)));
}

Value bitcast(const Value& x, at::ScalarType element) {
  if (x.element() == element) return x;
  // XLA's bool has one bit, libtorch's a byte.
  if (x.element() == at::kBool) return bitcast(convert(x, at::kByte), element);
  if (element == at::kBool) return convert(bitcast(x, at::kByte), at::kBool);
  if (x.rank() == 0) {
    const auto list = bitcast(reshape(x, {1}), element);
    return list.size(0) == 1 ? reshape(list, {}) : list;
  }
  if (c10::isComplexType(x.element())) return bitcast(as_pairs(x), element);
  if (c10::isComplexType(element)) return from_pairs(bitcast(x, c10::toRealValueType(element)));
  const auto from = static_cast<int64_t>(c10::elementSize(x.element())), to = static_cast<int64_t>(c10::elementSize(element));
  auto sizes = x.sizes();
  if (from == to) return make("bitcast_convert", {x}, {}, {element, sizes});
  if (from > to) {
    auto split = sizes;
    split.push_back(from / to);
    sizes.back() *= from / to;
    return reshape(make("bitcast_convert", {x}, {}, {element, split}), sizes);
  }
  sizes.back() /= to / from;
  auto split = sizes;
  split.push_back(to / from);
  return make("bitcast_convert", {reshape(x, split)}, {}, {element, sizes});
}

Value reshape(const Value& x, IntList sizes) {
  return x.sizes() == sizes ? x : make("reshape", {x}, {}, {x.element(), sizes.vec()});
}

Value transpose(const Value& x, IntList permutation) {
  Sizes sizes;
  for (const auto from : permutation) sizes.push_back(x.size(from));
  if (std::ranges::is_sorted(permutation)) return x;
  return make("transpose", {x}, "permutation = " + array(permutation), {x.element(), std::move(sizes)});
}

Sizes inverse(const Sizes& permutation) {
  Sizes inverse(permutation.size());
  for (size_t i = 0; i < permutation.size(); i++) inverse[static_cast<size_t>(permutation[i])] = static_cast<int64_t>(i);
  return inverse;
}

Value reverse(const Value& x, IntList dimensions) {
  return dimensions.empty() ? x : make("reverse", {x}, "dimensions = " + array(dimensions), x.type());
}

Value broadcast(const Value& x, IntList sizes, IntList dimensions) {
  if (x.sizes() == sizes) return x;
  return make("broadcast_in_dim", {x}, "broadcast_dimensions = " + array(dimensions), {x.element(), sizes.vec()});
}

Value expand(const Value& x, IntList sizes) {
  const auto offset = static_cast<int64_t>(sizes.size()) - x.rank();
  Sizes kept, dimensions;
  for (int64_t i = 0; i < x.rank(); i++) {
    if (x.size(i) != sizes[static_cast<size_t>(i + offset)]) continue;
    kept.push_back(x.size(i));
    dimensions.push_back(i + offset);
  }
  return broadcast(reshape(x, kept), sizes, dimensions);
}

Value slice(const Value& x, IntList start, IntList limit, IntList strides) {
  Sizes sizes;
  for (size_t i = 0; i < start.size(); i++) sizes.push_back((limit[i] - start[i] + strides[i] - 1) / strides[i]);
  if (x.sizes() == sizes) return x;
  const bool is_dense = std::ranges::all_of(strides, [](int64_t stride) { return stride == 1; });
  return make("slice", {x}, fmt::format("limit_indices = {}, start_indices = {}, strides = {}", array(limit), array(start), array(strides)),
              {x.element(), std::move(sizes)}, Combine::None, is_dense ? Numbers(start.begin(), start.end()) : Numbers());
}

Value slice(const Value& x, int64_t dimension, int64_t start, int64_t limit, int64_t step) {
  Sizes starts(x.rank(), 0), limits = x.sizes(), strides(x.rank(), 1);
  const auto d = static_cast<size_t>(dimension);
  starts[d] = start;
  limits[d] = limit;
  strides[d] = step;
  return slice(x, starts, limits, strides);
}

Value pad(const Value& x, const Value& fill, IntList low, IntList high, IntList interior) {
  Sizes sizes;
  for (size_t i = 0; i < low.size(); i++) {
    const auto size = x.size(i);
    sizes.push_back(low[i] + high[i] + size + std::max<int64_t>(size - 1, 0) * interior[i]);
  }
  return make("pad", {x, fill},
              fmt::format("edge_padding_high = {}, edge_padding_low = {}, interior_padding = {}", array(high), array(low), array(interior)),
              {x.element(), std::move(sizes)});
}

Value concatenate(std::span<const Value> parts, int64_t dimension) {
  if (parts.size() == 1) return parts[0];
  auto sizes = parts[0].sizes();
  auto& size = sizes[static_cast<size_t>(dimension)];
  size = 0;
  for (const auto& part : parts) size += part.size(dimension);
  return make("concatenate", Operands(parts.begin(), parts.end()), fmt::format("dimension = {} : i64", dimension),
              {parts[0].element(), std::move(sizes)});
}

Value dynamic_slice(const Value& x, std::span<const Value> start, IntList sizes) {
  Operands operands{x};
  operands.append(start.begin(), start.end());
  return make("dynamic_slice", std::move(operands), "slice_sizes = " + array(sizes), {x.element(), sizes.vec()});
}

Value dynamic_update_slice(const Value& x, const Value& update, std::span<const Value> start) {
  Operands operands{x, update};
  operands.append(start.begin(), start.end());
  return make("dynamic_update_slice", std::move(operands), {}, x.type());
}

Value reduce(const Value& x, Combine combine, const Value& start, IntList dimensions) {
  Sizes sizes;
  for (int64_t i = 0; i < x.rank(); i++) {
    if (std::ranges::find(dimensions, i) == dimensions.end()) sizes.push_back(x.size(i));
  }
  if (dimensions.empty()) return x;
  return make("reduce", {x, start}, "dimensions = " + array(dimensions), {x.element(), std::move(sizes)}, combine);
}

Value sum(const Value& x, IntList dimensions) {
  return reduce(x, Combine::Add, constant(0, x.element()), dimensions);
}

Value maximum(const Value& x, IntList dimensions) {
  return reduce(x, Combine::Max, lowest(x.element()), dimensions);
}

namespace {

/// Asks for full float32 products, as in libtorch, unless setFloat32MatmulPrecision allows less. By default, GPUs and TPUs round the factors.
std::string precision_of(const Value& factor) {
  if (factor.element() != at::kFloat) return "";
  const auto allowed = at::globalContext().float32MatmulPrecision();
  if (allowed == at::Float32MatmulPrecision::MEDIUM) return "";
  const auto* const name = allowed == at::Float32MatmulPrecision::HIGHEST ? "HIGHEST" : "HIGH";
  return fmt::format(", precision_config = [#stablehlo<precision {0}>, #stablehlo<precision {0}>]", name);
}

}  // namespace

Value dot(const Value& a, const Value& b, const DotDimensions& d, std::optional<at::ScalarType> result) {
  Type type{result.value_or(a.element()), {}};
  for (const auto i : d.left_batch) type.sizes.push_back(a.size(i));
  const auto rest = [&](const Value& x, const Sizes& batch, const Sizes& contracting) {
    for (int64_t i = 0; i < x.rank(); i++) {
      if (std::ranges::find(batch, i) == batch.end() && std::ranges::find(contracting, i) == contracting.end()) {
        type.sizes.push_back(x.size(i));
      }
    }
  };
  rest(a, d.left_batch, d.left_contracting);
  rest(b, d.right_batch, d.right_contracting);
  std::string batch;
  if (!d.left_batch.empty()) {
    batch = fmt::format("lhs_batching_dimensions = {}, rhs_batching_dimensions = {}, ", list(d.left_batch), list(d.right_batch));
  }
  return make("dot_general", {a, b},
              fmt::format("dot_dimension_numbers = #stablehlo.dot<{}lhs_contracting_dimensions = {}, rhs_contracting_dimensions = {}>{}",
                          batch, list(d.left_contracting), list(d.right_contracting), precision_of(a)),
              std::move(type));
}

Value convolution(const Value& input, const Value& filter, const Type& result, const std::string& names, const Window& window,
                  int64_t feature_groups, int64_t batch_groups) {
  const auto count = result.sizes.size() - 2;
  return make(
      "convolution", {input, filter},
      fmt::format(
          "batch_group_count = {} : i64, dimension_numbers = #stablehlo.conv<{}>, feature_group_count = {} : i64, lhs_dilation = {}, "
          "padding = {}, rhs_dilation = {}, window_strides = {}{}",
          batch_groups, names, feature_groups, array(or_all(window.base_dilation, count, 1)),
          padding_of(or_all(window.padding_low, count, 0), or_all(window.padding_high, count, 0)), array(or_all(window.dilation, count, 1)),
          array(or_all(window.stride, count, 1)), precision_of(input)),
      result);
}

Value reduce_window(const Value& x, Combine combine, const Value& start, const Window& window) {
  Sizes sizes;
  for (size_t i = 0; i < window.size.size(); i++) {
    const auto size = x.size(i), base = window.base_dilation.empty() ? 1 : window.base_dilation[i];
    const auto padded =
        (size ? (size - 1) * base + 1 : 0) + (window.padding_low.empty() ? 0 : window.padding_low[i] + window.padding_high[i]);
    const auto reach = (window.size[i] - 1) * (window.dilation.empty() ? 1 : window.dilation[i]) + 1;
    sizes.push_back(padded < reach ? 0 : (padded - reach) / (window.stride.empty() ? 1 : window.stride[i]) + 1);
  }
  return make("reduce_window", {x, start}, window_of(window), {x.element(), std::move(sizes)}, combine);
}

Value take(const Value& x, const Value& indices, int64_t dimension) {
  const auto d = static_cast<size_t>(dimension);
  Sizes sizes(x.sizes().begin(), x.sizes().begin() + dimension), rows = x.sizes(), offsets;
  for (int64_t i = 0; i < dimension; i++) offsets.push_back(i);
  sizes.insert(sizes.end(), indices.sizes().begin(), indices.sizes().end());
  for (size_t i = d + 1; i < x.sizes().size(); i++) {
    offsets.push_back(static_cast<int64_t>(sizes.size()));
    sizes.push_back(x.size(i));
  }
  rows[d] = 1;
  return make("gather", {x, indices},
              fmt::format("dimension_numbers = #stablehlo.gather<offset_dims = {}, collapsed_slice_dims = [{}], start_index_map = [{}], "
                          "index_vector_dim = {}>, indices_are_sorted = false, slice_sizes = {}",
                          list(offsets), dimension, dimension, indices.rank(), array(rows)),
              {x.element(), std::move(sizes)});
}

Value put(const Value& x, const Value& indices, const Value& updates, Combine combine) {
  Sizes window;
  for (int64_t i = indices.rank(); i < updates.rank(); i++) window.push_back(i);
  return make(
      "scatter", {x, indices, updates},
      fmt::format(
          "indices_are_sorted = false, scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = {}, inserted_window_dims = "
          "[0], scatter_dims_to_operand_dims = [0], index_vector_dim = {}>, unique_indices = false",
          list(window), indices.rank()),
      x.type(), combine);
}

std::pair<Value, Value> sort(const Value& given, int64_t dimension, Order order) {
  auto x = given;
  if (c10::isFloatingType(x.element())) {
    // TOTALORDER puts -0 before 0 and sorts NaN by its sign; in libtorch, zeros are equal and NaN is the largest.
    const auto zeros = full(0, x.type());
    x = select(compare("EQ", x, zeros), zeros, x);
    x = select(compare("NE", x, x), full(std::numeric_limits<double>::quiet_NaN(), x.type()), x);
  }
  const auto places = iota({at::kLong, x.sizes()}, dimension);
  // The node's name says the direction, because StepProgram::key() includes names. StepProgram prints both names as "sort", and the
  // direction in the region.
  const auto node = c10::make_intrusive<Node>(order == Order::Ascending ? "sort" : "sort_descending",
                                              fmt::format("dimension = {} : i64, is_stable = true", dimension), Operands{x, places},
                                              Results{x.type(), places.type()});
  return {Value(node, 0), Value(node, 1)};
}

std::pair<Value, Value> random_bits(const Value& state, const Type& type, const char* algorithm) {
  const auto node = c10::make_intrusive<Node>("rng_bit_generator", fmt::format("rng_algorithm = #stablehlo<rng_algorithm {}>", algorithm),
                                              Operands{state}, Results{state.type(), type});
  return {Value(node, 0), Value(node, 1)};
}

namespace {

std::string text_of(const ReplicaGroups& groups) {
  std::string rows;
  for (const auto& group : groups) rows += fmt::format("{}[{}]", rows.empty() ? "" : ", ", fmt::join(group, ", "));
  return fmt::format("replica_groups = dense<[{}]> : tensor<{}x{}xi64>", rows, groups.size(), groups.front().size());
}

int64_t size_of(const ReplicaGroups& groups) {
  return static_cast<int64_t>(groups.front().size());
}

}  // namespace

Value all_gather(const Value& list, const ReplicaGroups& groups) {
  return make("all_gather", {list}, "all_gather_dim = 0 : i64, " + text_of(groups), {list.element(), {list.size(0) * size_of(groups)}});
}

Value all_reduce(const Value& x, Combine combine, const ReplicaGroups& groups) {
  return make("all_reduce", {x}, text_of(groups), x.type(), combine);
}

Value reduce_scatter(const Value& list, Combine combine, const ReplicaGroups& groups) {
  return make("reduce_scatter", {list}, text_of(groups) + ", scatter_dimension = 0 : i64",
              {list.element(), {list.size(0) / size_of(groups)}}, combine);
}

Value replica_number() {
  return make("replica_id", {}, {}, {at::kUInt32, {}});
}

std::vector<Value> barrier(std::span<const Value> values) {
  Results types;
  for (const auto& value : values) types.push_back(value.type());
  const auto node =
      c10::make_intrusive<Node>("optimization_barrier", std::string(), Operands(values.begin(), values.end()), std::move(types));
  std::vector<Value> same;
  for (uint32_t i = 0; i < values.size(); i++) same.emplace_back(node, i);
  return same;
}

}  // namespace tessera::xla::hlo
