// Operators that pick, place and order elements.
#include <ATen/ExpandUtils.h>
#include <ATen/WrapDimUtils.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tessera/base/error.h"
#include "tessera/xla/device/kernels.h"
#include "tessera/xla/device/views.h"
#include "tessera/xla/graph/arithmetic.h"

namespace tessera::xla {
namespace {

using hlo::plus;
using hlo::times;
using hlo::fixed;
using hlo::flat;

/// A place in a list for each element of `indices`: as the element's own place, but by `indices` along one dimension of `sizes`.
Value places_along(const Value& indices, const Sizes& sizes, int64_t dimension) {
  auto places = fixed(indices, 0);
  int64_t stride = 1;
  for (auto d = indices.rank() - 1; d >= 0; d--) {
    const auto along = d == dimension ? indices : hlo::iota(indices.type(), d);
    places = plus(places, times(along, fixed(indices, stride)));
    stride *= sizes[static_cast<size_t>(d)];
  }
  return places;
}

void gather(Call& call) {
  const auto x = call.value(0), indices = call.value(2, at::kLong);
  if (x.rank() == 0) return call.give(hlo::reshape(x, indices.sizes()));
  call.give(hlo::take_elements(flat(x), places_along(indices, x.sizes(), at::maybe_wrap_dim(call.integer(1), x.rank()))));
}

void scatter_with(Call& call, Combine combine) {
  const auto x = call.value(0), indices = call.value(2, at::kLong);
  const auto d = at::maybe_wrap_dim(call.integer(1), std::max<int64_t>(x.rank(), 1));
  auto source = call[3].isTensor() ? call.value(3, x.element()) : hlo::full(call.number(3), {x.element(), indices.sizes()});
  if (source.sizes() != indices.sizes()) {
    source = hlo::slice(source, Sizes(indices.sizes().size(), 0), indices.sizes(), Sizes(indices.sizes().size(), 1));
  }
  const auto places = flat(places_along(indices, x.sizes(), d));
  call.give(hlo::reshape(hlo::put(flat(x), places, flat(source), combine), x.sizes()));
}
void scatter(Call& call) { scatter_with(call, Combine::Second); }
void scatter_add(Call& call) { scatter_with(call, Combine::Add); }

/// What a list of index tensors means: which dimensions they take, and which rows they name.
struct Indexed {
  Sizes order;     // of the tensor's dimensions: those with indices first
  Sizes rest;      // sizes of the others
  Sizes common;    // the shape of all index tensors together
  int64_t rows = 1;
  int64_t before = 0;  // dimensions of the result before those of the indices
  Value places;    // rows, in the common shape
};

Indexed indexed(const Value& x, const c10::IValue& list) {
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
    taken.push_back(d);
    indices.push_back(hlo::convert(read(tensor), at::kLong));
    result.common = at::infer_size(result.common, tensor.sizes());
  }
  const bool adjacent = taken.empty() || taken.back() - taken.front() + 1 == static_cast<int64_t>(taken.size());
  result.before = adjacent && !taken.empty() ? taken.front() : 0;
  result.order = taken;
  result.order.insert(result.order.end(), others.begin(), others.end());
  for (const auto d : others) result.rest.push_back(x.sizes()[static_cast<size_t>(d)]);
  result.places = hlo::broadcast(hlo::constant(int64_t{0}, at::kLong), result.common, {});
  for (size_t i = 0; i < taken.size(); i++) {
    const auto size = x.sizes()[static_cast<size_t>(taken[i])];
    auto index = hlo::expand(indices[i], result.common);
    index = hlo::select(hlo::compare("LT", index, fixed(index, 0)), plus(index, fixed(index, size)), index);
    result.places = plus(times(result.places, fixed(index, size)), index);
    result.rows *= size;
  }
  return result;
}

/// From indices first to where they stand in the result.
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
  const auto i = indexed(x, call[1]);
  const auto rows = hlo::reshape(hlo::transpose(x, i.order), rows_first(i));
  call.give(hlo::transpose(hlo::take(rows, i.places, 0), result_order(i)));
}

void index_put(Call& call) {
  const auto x = call.value(0);
  const auto i = indexed(x, call[1]);
  const auto turned = hlo::transpose(x, i.order);
  Sizes first = i.common;
  first.insert(first.end(), i.rest.begin(), i.rest.end());
  const auto order = result_order(i);
  Sizes result;
  for (const auto d : order) result.push_back(first[static_cast<size_t>(d)]);
  const auto values = hlo::transpose(hlo::expand(call.value(2, x.element()), result), hlo::inverse(order));
  const auto updated = hlo::put(hlo::reshape(turned, rows_first(i)), i.places, values, call.flag(3) ? Combine::Add : Combine::Second);
  call.give(hlo::transpose(hlo::reshape(updated, turned.sizes()), hlo::inverse(i.order)));
}

void triangle(Call& call, const char* direction) {
  const auto x = call.value(0);
  const Type places{at::kLong, x.sizes()};
  const auto row = hlo::iota(places, x.rank() - 2), column = hlo::iota(places, x.rank() - 1);
  const auto kept = hlo::compare(direction, column, plus(row, fixed(row, call.integer(1))));
  call.give(hlo::select(kept, x, fixed(x, 0)));
}
void tril(Call& call) { triangle(call, "LE"); }
void triu(Call& call) { triangle(call, "GE"); }

void arange(Call& call) {
  const auto& out = *call.out();
  const auto start = call[0].toScalar(), end = call[1].toScalar(), step = call[2].toScalar();
  const bool integral = c10::isIntegralType(out.scalar_type(), false);
  const auto count = integral ? (end.toLong() - start.toLong() + step.toLong() + (step.toLong() > 0 ? -1 : 1)) / step.toLong()
                              : static_cast<int64_t>(std::ceil((end.toDouble() - start.toDouble()) / step.toDouble()));
  const Type type{integral ? at::kLong : at::kFloat, {count}};
  const auto places = hlo::iota(type, 0);
  if (integral) return call.give(hlo::convert(plus(times(places, fixed(places, step.toLong())), fixed(places, start.toLong())), out.scalar_type()));
  call.give(hlo::convert(plus(times(places, hlo::full(step.toDouble(), type)), hlo::full(start.toDouble(), type)), out.scalar_type()));
}

void flip(Call& call) {
  const auto x = call.value(0);
  auto dimensions = call.integers(1);
  for (auto& d : dimensions) d = at::maybe_wrap_dim(d, x.rank());
  call.give(hlo::reverse(x, dimensions));
}

void sort(Call& call) {
  const auto x = call.value(0);
  if (x.rank() == 0) return call.give(std::vector{x, hlo::constant(int64_t{0}, at::kLong)});
  const auto [values, places] = hlo::sort(x, at::maybe_wrap_dim(call.integer(2), x.rank()), call.flag(3) ? hlo::Order::Descending : hlo::Order::Ascending);
  call.give(std::vector{values, places});
}

void topk(Call& call) {
  const auto x = call.value(0);
  const auto d = at::maybe_wrap_dim(call.integer(2), x.rank());
  const auto [values, places] = hlo::sort(x, d, call.flag(3) ? hlo::Order::Descending : hlo::Order::Ascending);
  call.give(std::vector{hlo::slice(values, d, 0, call.integer(1)), hlo::slice(places, d, 0, call.integer(1))});
}

void cumulative_sum(Call& call) {
  const auto type = call.result_type();
  const auto x = call.value(0, type == at::kBFloat16 || type == at::kHalf ? at::kFloat : type);
  if (x.rank() == 0) return call.give(hlo::convert(x, type));
  const auto d = static_cast<size_t>(at::maybe_wrap_dim(call.integer(1), x.rank()));
  Sizes size(x.sizes().size(), 1), low(x.sizes().size(), 0);
  size[d] = x.sizes()[d];
  low[d] = x.sizes()[d] - 1;
  const auto sum = hlo::reduce_window(x, Combine::Add, hlo::constant(int64_t{0}, x.element()),
                                      {.size = size, .stride = {}, .padding_low = low, .padding_high = Sizes(size.size(), 0), .base_dilation = {}, .dilation = {}});
  call.give(hlo::convert(sum, type));
}

const Kernel kIndexing[] = {
    {"gather.out", gather},
    {"scatter.src_out", scatter},
    {"scatter.value_out", scatter},
    {"scatter_add.out", scatter_add},
    {"index.Tensor_out", index},
    {"_index_put_impl_", index_put},
    {"tril.out", tril},
    {"triu.out", triu},
    {"arange.start_out", arange},
    {"flip", flip},
    {"sort.values_stable", sort},
    {"topk.values", topk},
    {"cumsum.out", cumulative_sum},
};

}  // namespace

void register_indexing() { add_kernels(kIndexing); }

}  // namespace tessera::xla
