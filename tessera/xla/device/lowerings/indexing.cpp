// Operators that read or write elements by their indices, such as gather, scatter and index_put.
#include <ATen/ExpandUtils.h>

#include "tessera/xla/device/dimensions.h"
#include "tessera/xla/device/elements.h"
#include "tessera/xla/device/views.h"
#include "tessera/xla/graph/scan.h"

namespace tessera::xla {
namespace {

/// Returns the permutation that puts dimension `d` first.
Sizes with_first(int64_t d, int64_t rank) {
  auto order = all_dimensions(rank);
  std::rotate(order.begin(), order.begin() + d, order.begin() + d + 1);
  return order;
}

/// Converts negative numbers, which count from the end, to numbers from the start.
Value from_start(const Value& places, int64_t size) {
  return select(places < 0, places + size, places);
}

/// What an index outside of its dimension names: the nearest element, or none. It would otherwise name an element of another row, because
/// lowerings flatten dimensions to one list.
enum class Outside { Nearest, Nowhere };

Value nearest_inside(const Value& indices, int64_t size) {
  return largest(smallest(indices, size - 1), 0);
}

/// Replaces the place of each index outside of its dimension by `end`, the end of the list, where a scatter writes nothing.
Value nowhere_if_outside(const Value& places, const Value& indices, int64_t size, int64_t end) {
  const auto is_outside = (indices < 0) | (indices >= size);
  return select(is_outside, end, places);
}

/// Returns, for each element of `indices`, a place in the flattened tensor. Its coordinates are those of the element itself, except along
/// `dimension`, where the element's value is the coordinate.
Value places_along(const Value& indices, const Sizes& sizes, int64_t dimension, Outside outside) {
  const auto size = sizes[static_cast<size_t>(dimension)];
  const auto inside = outside == Outside::Nearest ? nearest_inside(indices, size) : indices;
  auto places = fixed(indices, 0);
  int64_t stride = 1;
  for (auto d = indices.rank() - 1; d >= 0; d--) {
    const auto along = d == dimension ? inside : hlo::iota(indices.type(), d);
    places = places + along * stride;
    stride *= sizes[static_cast<size_t>(d)];
  }
  return outside == Outside::Nearest ? places : nowhere_if_outside(places, indices, size, stride);
}

void gather(Call& call) {
  const auto x = with_a_dimension(call.value(0)), indices = call.value(2, at::kLong), listed = with_a_dimension(indices);
  const auto places = places_along(listed, x.sizes(), wrapped(call.integer(1), x.rank()), Outside::Nearest);
  call.give(reshape(take(flat(x), flat(places), 0), indices.sizes()));
}

void take(Call& call) {
  const auto x = flat(call.value(0)), indices = call.value(1, at::kLong);
  if (x.size(0) == 0) return call.give(hlo::filled(0, {x.element(), indices.sizes()}));  // there is nothing to read
  call.give(take(x, from_start(indices, x.size(0)), 0));
}

void put(Call& call) {
  const auto x = call.value(0), list = flat(x), indices = call.value(1, at::kLong), source = flat(call.value(2, x.element()));
  const auto combine = call.flag(3) ? Combine::Add : Combine::Second;
  if (list.size(0) == 0) return call.give(x);  // there is nothing to write
  const auto places = flat(from_start(indices, list.size(0)));
  call.give(reshape(put(list, places, source, combine), x.sizes()));
}

// --- reductions of elements that go to one place ---

/// Reduces the rows of `updates` that have the same place in dimension 0 of `x`. If `keeps_self`, the row of `x` at this place is one of
/// the reduced rows.
Value put_reduced(const Value& x, const Value& places, const Value& updates, std::string_view reduce, bool keeps_self) {
  const bool mean = reduce == "mean";
  const auto combine = reduce == "sum" || reduce == "add" || mean ? Combine::Add
                       : reduce == "prod" || reduce == "multiply" ? Combine::Multiply
                       : reduce == "amax"                         ? Combine::Max
                                                                  : Combine::Min;
  const auto start = combine == Combine::Add        ? hlo::constant(0, x.element())
                     : combine == Combine::Multiply ? hlo::constant(1, x.element())
                     : combine == Combine::Max      ? hlo::lowest(x.element())
                                                    : hlo::highest(x.element());
  const auto ones = hlo::filled(1, {at::kLong, updates.sizes()});
  const auto none = hlo::filled(0, {at::kLong, x.sizes()});
  const auto counts = put(none, places, ones, Combine::Add);
  const auto is_met = counts > none;
  const auto base = keeps_self ? x : select(is_met, broadcast(start, x.sizes(), {}), x);
  auto result = put(base, places, updates, combine);
  if (!mean) return result;
  const auto divisor = keeps_self ? counts + 1 : largest(counts, 1);
  const auto share = convert(divisor, x.element());
  result = c10::isFloatingType(x.element()) ? result / share : floor_divided(result, share);
  return result;
}

struct Scattered {
  Value x, places, source;
};
Scattered scattered(const Call& call, at::ScalarType element) {
  const auto x = with_a_dimension(call.value(0, element)), indices = with_a_dimension(call.value(2, at::kLong));
  auto source = with_a_dimension(call[3].isTensor() ? call.value(3, element) : expand(call.value(3, element), indices.sizes()));
  const Sizes none(indices.rank(), 0), ones(indices.rank(), 1);
  source = slice(source, none, indices.sizes(), ones);
  const auto places = places_along(indices, x.sizes(), wrapped(call.integer(1), x.rank()), Outside::Nowhere);
  return {flat(x), flat(places), flat(source)};
}

Lowering scatter(Combine combine) {
  return [=](Call& call) {
    const auto [x, places, source] = scattered(call, combine == Combine::Second ? call.result_type() : hlo::wide(call.result_type()));
    call.give(reshape(convert(put(x, places, source, combine), call.result_type()), call.tensor(0).sizes()));
  };
}

void scatter_reduced(Call& call) {
  const auto [x, places, source] = scattered(call, hlo::wide(call.result_type()));
  const bool keeps_self = call.arguments() < 6 || call.flag(5);
  const auto result = put_reduced(x, places, source, call[4].toStringView(), keeps_self);
  call.give(reshape(convert(result, call.result_type()), call.tensor(0).sizes()));
}

// --- whole rows of one dimension ---

/// Gives the result of `change`, which gets the tensor, the places and the rows. The tensor and the rows are transposed so that the indexed
/// dimension is their first.
template <class Change>
void change_rows(Call& call, at::ScalarType element, const Change& change) {
  const auto x = with_a_dimension(call.value(0, element));
  const auto d = wrapped(call.integer(1), x.rank());
  const auto order = with_first(d, x.rank());
  const auto turned = transpose(x, order);
  const auto places = flat(from_start(call.value(2, at::kLong), x.size(d)));
  auto row_sizes = turned.sizes();
  row_sizes[0] = places.size(0);
  auto rows = call.value(3, element);
  rows = rows.rank() ? transpose(rows, order) : broadcast(rows, row_sizes, {});
  const auto result = transpose(change(turned, places, rows), hlo::inverse(order));
  call.give_rounded(reshape(result, call.tensor(0).sizes()));
}

void index_add(Call& call) {
  change_rows(call, hlo::wide(call.result_type()), [&](const Value& x, const Value& places, const Value& rows) {
    const auto alpha = call.value(4, x.element());
    return put(x, places, call.number(4) == 1 ? rows : rows * broadcast(alpha, rows.sizes(), {}), Combine::Add);
  });
}

void index_copy(Call& call) {
  change_rows(call, call.result_type(),
              [](const Value& x, const Value& places, const Value& rows) { return put(x, places, rows, Combine::Second); });
}

void index_reduce(Call& call) {
  change_rows(call, hlo::wide(call.result_type()), [&](const Value& x, const Value& places, const Value& rows) {
    return put_reduced(x, places, rows, call[4].toStringView(), call.flag(5));
  });
}

void index_select(Call& call) {
  const auto x = with_a_dimension(call.value(0)), places = flat(call.value(2, at::kLong));
  const auto picked = take(x, places, wrapped(call.integer(1), x.rank()));
  call.give(call.tensor(0).dim() ? picked : reshape(picked, {}));
}

void masked_scatter(Call& call) {
  const auto x = call.value(0), source = flat(call.value(2, x.element()));
  const auto mask = flat(expand(call.value(1, at::kBool), x.sizes()));
  if (source.size(0) == 0) return call.give(x);
  const auto counted = convert(mask, at::kLong);
  const auto places = running(counted, 0, Combine::Add) - 1;
  const auto last = fixed(places, source.size(0) - 1);
  const auto picked = take(source, smallest(largest(places, 0), last), 0);
  call.give(reshape(select(mask, picked, flat(x)), x.sizes()));
}

/// A list of index tensors in the form of one gather of rows: the indexed dimensions are put first and flattened to rows, and `places`
/// names a row for each index.
struct Indexed {
  Sizes order;   // the tensor's dimensions, those with indices first
  Sizes rest;    // sizes of the dimensions without indices
  Sizes common;  // the shape to which all index tensors are broadcast
  int64_t rows = 1;
  int64_t before = 0;  // how many dimensions of the result come before those of the indices
  Value places;        // the row that each index names, in the shape `common`
};

Indexed indexed(const Value& x, const c10::IValue& list, Outside outside) {
  Indexed result;
  std::vector<Value> indices;
  Sizes taken, others;
  const auto tensors = list.toOptionalTensorVector();
  for (int64_t d = 0; d < x.rank(); d++) {
    if (d >= static_cast<int64_t>(tensors.size()) || !tensors[static_cast<size_t>(d)] || !tensors[static_cast<size_t>(d)]->defined()) {
      others.push_back(d);
      continue;
    }
    const auto& tensor = *tensors[static_cast<size_t>(d)];
    if (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte)
      throw NotLowered();  // only the values of a mask tell how many rows it names
    taken.push_back(d);
    indices.push_back(convert(read(tensor), at::kLong));
    result.common = at::infer_size(result.common, tensor.sizes());
  }
  const bool adjacent = taken.empty() || taken.back() - taken.front() + 1 == static_cast<int64_t>(taken.size());
  result.before = adjacent && !taken.empty() ? taken.front() : 0;
  result.order = taken;
  result.order.insert(result.order.end(), others.begin(), others.end());
  for (const auto d : others) result.rest.push_back(x.size(d));
  result.places = hlo::filled(0, {at::kLong, result.common});
  for (size_t i = 0; i < taken.size(); i++) {
    const auto size = x.size(taken[i]);
    indices[i] = from_start(expand(indices[i], result.common), size);
    if (outside == Outside::Nearest) indices[i] = nearest_inside(indices[i], size);
    result.places = result.places * size + indices[i];
    result.rows *= size;
  }
  for (size_t i = 0; outside == Outside::Nowhere && i < taken.size(); i++) {
    result.places = nowhere_if_outside(result.places, indices[i], x.size(taken[i]), result.rows);
  }
  return result;
}

/// The permutation that moves the dimensions of the indices from the front to their place in the result.
Sizes result_order(const Indexed& i) {
  const auto common = static_cast<int64_t>(i.common.size()), rest = static_cast<int64_t>(i.rest.size());
  Sizes order;
  for (int64_t d = 0; d < i.before; d++) order.push_back(common + d);
  for (int64_t d = 0; d < common; d++) order.push_back(d);
  for (int64_t d = i.before; d < rest; d++) order.push_back(common + d);
  return order;
}

Sizes rows_first(const Indexed& i) {
  Sizes sizes{i.rows};
  sizes.insert(sizes.end(), i.rest.begin(), i.rest.end());
  return sizes;
}

void index(Call& call) {
  const auto x = call.value(0);
  const auto i = indexed(x, call[1], Outside::Nearest);
  const auto rows = reshape(transpose(x, i.order), rows_first(i));
  call.give(transpose(take(rows, i.places, 0), result_order(i)));
}

/// Lowers a write of one number to all elements that a mask selects, as a select. Returns whether the call is such a write.
bool put_by_mask(Call& call) {
  const auto tensors = call[1].toOptionalTensorVector();
  if (tensors.size() != 1 || !tensors[0] || tensors[0]->scalar_type() != at::kBool || call.tensor(2).numel() != 1 || call.flag(3))
    return false;
  const auto x = call.value(0), mask = read(*tensors[0]);
  const auto number = reshape(call.value(2, x.element()), {});
  call.give(select(broadcast(mask, x.sizes(), all_dimensions(mask.rank())), broadcast(number, x.sizes(), {}), x));
  return true;
}

void index_put(Call& call) {
  if (put_by_mask(call)) return;
  const auto x = call.value(0);
  const auto i = indexed(x, call[1], Outside::Nowhere);
  const auto turned = transpose(x, i.order);
  Sizes first = i.common;
  first.insert(first.end(), i.rest.begin(), i.rest.end());
  const auto order = result_order(i);
  Sizes result;
  for (const auto d : order) result.push_back(first[static_cast<size_t>(d)]);
  const auto values = transpose(expand(call.value(2, x.element()), result), hlo::inverse(order));
  const auto updated = put(reshape(turned, rows_first(i)), i.places, values, call.flag(3) ? Combine::Add : Combine::Second);
  call.give(transpose(reshape(updated, turned.sizes()), hlo::inverse(i.order)));
}

}  // namespace

void register_indexing() {
  add_kernels({
      {"gather", gather},
      {"take", take},
      {"put_", put},
      {"scatter.src scatter.value", scatter(Combine::Second)},
      {"scatter_add", scatter(Combine::Add)},
      {"scatter.reduce scatter.value_reduce scatter_reduce.two", scatter_reduced},
      {"index.Tensor", index},
      {"_index_put_impl_", index_put},
      {"index_add", index_add},
      {"index_copy index_fill_.int_Scalar index_fill_.int_Tensor", index_copy},
      {"index_reduce", index_reduce},
      {"index_select", index_select},
      {"masked_scatter_", masked_scatter},
  });
}

}  // namespace tessera::xla
