// Sorts, selections by rank, and running operators along a dimension, such as cumsum.
#include "tessera/xla/device/dimensions.h"
#include "tessera/xla/device/elements.h"
#include "tessera/xla/device/views.h"
#include "tessera/xla/graph/scan.h"

namespace tessera::xla {
namespace {

hlo::Order order_of(const Call& call, size_t descending) {
  return call.flag(descending) ? hlo::Order::Descending : hlo::Order::Ascending;
}

void sort(Call& call) {
  const auto x = call.value(0), listed = with_a_dimension(x);
  const auto [values, places] = sort(listed, wrapped(call.integer(2), listed.rank()), order_of(call, 3));
  call.give({reshape(values, x.sizes()), reshape(places, x.sizes())});
}

void topk(Call& call) {
  const auto x = with_a_dimension(call.value(0));
  const auto d = wrapped(call.integer(2), x.rank());
  const auto [values, places] = sort(x, d, order_of(call, 3));
  const auto first = [&](const Value& all) { return reshape(slice(all, d, 0, call.integer(1)), call.out()->sizes()); };
  call.give({first(values), first(places)});
}

/// One element of each sorted row: its value, and its place in the row before sorting.
struct Picked {
  Value value, place;
};
Picked picked(const Value& values, const Value& places, int64_t d, const Value& which) {
  const auto here = compare("EQ", hlo::iota({at::kLong, values.sizes()}, d), spread(which, values, {d}));
  // The maximum is the picked element, even if it is NaN or infinite, because all others are replaced by the lowest value.
  return {maximum(select(here, values, broadcast(hlo::lowest(values.element()), values.sizes(), {})), {d}),
          hlo::sum(select(here, places, 0), {d})};
}

/// Gives one element of each row. `which` gets the sorted rows, and returns the place of the element in each.
template <class Which>
void pick(Call& call, const Value& x, int64_t d, bool keep, const Which& which) {
  const auto [values, places] = sort(x, d, hlo::Order::Ascending);
  const auto [value, place] = picked(values, places, d, which(values));
  auto sizes = x.sizes();
  if (keep) {
    sizes[static_cast<size_t>(d)] = 1;
  } else {
    sizes.erase(sizes.begin() + d);
  }
  if (call.tensor(0).dim() == 0) sizes.clear();
  call.give({reshape(value, sizes), reshape(place, sizes)});
}

void kth_value(Call& call) {
  const auto x = with_a_dimension(call.value(0));
  const auto d = wrapped(call.integer(2), x.rank());
  TORCH_CHECK(call.integer(1) >= 1 && call.integer(1) <= x.size(d), "kthvalue: selected number k out of range for dimension ", d);
  pick(call, x, d, call.flag(3), [&](const Value& sorted) {
    auto sizes = sorted.sizes();
    sizes.erase(sizes.begin() + d);
    return hlo::filled(call.integer(1) - 1, {at::kLong, sizes});
  });
}

enum class WithNan { Median, Ignored };

/// Returns the place of the median in each sorted row, in which NaN comes last. Of two elements in the middle, the lower one is the median.
/// WithNan::Ignored takes the middle of the numbers, WithNan::Median the first NaN if there is one.
Value middle_of(const Value& sorted, int64_t d, WithNan nan) {
  const auto size = sorted.size(d);
  const auto is_number =
      convert(c10::isFloatingType(sorted.element()) ? compare("EQ", sorted, sorted) : fixed(convert(sorted, at::kBool), 1), at::kLong);
  const auto numbers = hlo::sum(is_number, {d}), one = fixed(numbers, 1), two = fixed(numbers, 2), zero = fixed(numbers, 0);
  if (nan == WithNan::Ignored) return largest((numbers - one) / two, zero);
  return select(compare("EQ", numbers, size), (size - 1) / 2, numbers);
}

Lowering median_along(WithNan nan) {
  return [=](Call& call) {
    const auto x = with_a_dimension(call.value(0));
    const auto d = wrapped(call.integer(1), x.rank());
    TORCH_CHECK(x.size(d) > 0, "median: expected dimension ", d, " to have non-zero size");
    pick(call, x, d, call.flag(2), [&](const Value& sorted) { return middle_of(sorted, d, nan); });
  };
}

Lowering median(WithNan nan) {
  return [=](Call& call) {
    if (call.tensor(0).numel() == 0) throw NotLowered();
    const auto [values, places] = sort(flat(call.value(0)), 0, hlo::Order::Ascending);
    call.give(picked(values, places, 0, middle_of(values, 0, nan)).value);
  };
}

/// Gives, for each value, how many of the sorted numbers are smaller or, if `right`, smaller or equal.
void give_counts(Call& call, const Value& sorted, const Value& values, bool right, bool as_int) {
  // Broadcasts sorted rows against the values, which get one more dimension.
  auto pairs = values.sizes();
  const auto rank = values.rank();
  pairs.push_back(sorted.sizes().back());
  const auto all = broadcast(values, pairs, all_dimensions(rank));
  auto row_dimensions = all_dimensions(sorted.rank() - 1);
  row_dimensions.push_back(rank);
  const auto rows = broadcast(sorted, pairs, row_dimensions);
  const auto before = opposite(compare(right ? "GT" : "GE", rows, all));
  call.give(hlo::sum(convert(before, as_int ? at::kInt : at::kLong), {rank}));
}

void search_sorted(Call& call) {
  const auto lists = call.tensor(0).sizes();
  if (lists.size() != 1) {
    const auto values = call[1].isTensor() ? call.tensor(1).sizes() : at::IntArrayRef();
    TORCH_CHECK(!lists.empty() && lists.size() == values.size() && lists.slice(0, lists.size() - 1) == values.slice(0, lists.size() - 1),
                "searchsorted: boundaries must have 1 dimension, or the sizes of the values in all dimensions but the last, got ", lists, " and ",
                values);
  }
  const auto element = common_type(call);
  auto sorted = call.value(0, element);
  if (call.has(5)) sorted = convert(read(call.tensor(0).gather(-1, call.tensor(5))), element);
  const bool is_right_side = call.has(4) && call[4].toStringView() == "right", right = call.flag(3) || is_right_side;
  give_counts(call, sorted, call.value(1, element), right, call.flag(2));
}

void bucketize(Call& call) {
  TORCH_CHECK(call.tensor(1).dim() == 1, "bucketize: boundaries must have 1 dimension, got ", call.tensor(1).dim());
  const auto element = common_type(call);
  give_counts(call, call.value(1, element), call.value(0, element), call.flag(3), call.flag(2));
}

// --- running operators ---

Lowering running(Combine combine) {
  return [=](Call& call) {
    const auto x = call.wide_value(0);
    const auto d = call.integer(1);
    call.give_rounded(x.rank() ? running(x, wrapped(d, x.rank()), combine) : x);
  };
}

void log_of_running_sum(Call& call) {
  const auto x = call.wide_value(0);
  const auto d = call.integer(1);
  if (x.rank() == 0) return call.give_rounded(x);
  const auto fill = hlo::lowest(x.element());
  const auto result = hlo::scan({x}, wrapped(d, x.rank()), {fill}, [](const auto& earlier, const auto& later) {
    const auto &a = earlier[0], &b = later[0], large = largest(a, b);
    const auto sum = large + log_plus_one(exponential(-magnitude(a - b)));
    const auto is_infinite = compare("EQ", magnitude(large), std::numeric_limits<double>::infinity());
    return std::vector{select(is_infinite, large, sum)};
  });
  call.give_rounded(result[0]);
}

/// Lowers cummax and cummin. Of equal elements, the last one gives the index.
Lowering running_extreme(const char* direction) {
  return [=](Call& call) {
    const auto x = with_a_dimension(call.value(0));
    const auto d = wrapped(call.integer(3), x.rank());
    const auto fill = direction == std::string_view("GE") ? hlo::lowest(x.element()) : hlo::highest(x.element());
    const auto result = hlo::scan({x, hlo::iota({at::kLong, x.sizes()}, d)}, d, {fill, hlo::constant(0, at::kLong)},
                                  [&](const auto& earlier, const auto& later) {
                                    auto wins = compare(direction, later[0], earlier[0]);
                                    if (c10::isFloatingType(x.element())) wins = is_nan(later[0]) | (wins & opposite(is_nan(earlier[0])));
                                    return std::vector{select(wins, later[0], earlier[0]), select(wins, later[1], earlier[1])};
                                  });
    call.give({reshape(result[0], call.tensor(0).sizes()), reshape(result[1], call.tensor(0).sizes())});
  };
}

/// The gradient of x[k] is the product of all x before k, times the sum over j >= k of g[j] * x[k + 1] * ... * x[j]. A scan from the end
/// computes the sum. Nothing is divided by x, so zeros need no case of their own.
void running_product_gradient(Call& call) {
  const auto g = call.value(0), x = call.value(1, g.element());
  const auto named = call.integer(2);
  if (x.rank() == 0) return call.give(g);
  const auto d = wrapped(named, x.rank());
  const auto size = x.size(d);
  if (size == 0) return call.give(g);
  const auto one = hlo::constant(1, x.element()), zero = hlo::constant(0, x.element());
  const auto before = running(shifted(x, d, 1, one), d, Combine::Multiply);
  const auto next = reverse(shifted(x, d, -1, one), {d});
  const auto sums = hlo::scan({next, reverse(g, {d})}, d, {one, zero}, [](const auto& earlier, const auto& later) {
    return std::vector{earlier[0] * later[0], later[1] + later[0] * earlier[1]};
  });
  call.give(before * reverse(sums[1], {d}));
}

}  // namespace

void register_ordering() {
  add_kernels({
      {"sort.stable", sort},
      {"topk", topk},
      {"kthvalue", kth_value},
      {"median", median(WithNan::Median)},
      {"nanmedian", median(WithNan::Ignored)},
      {"median.dim", median_along(WithNan::Median)},
      {"nanmedian.dim", median_along(WithNan::Ignored)},
      {"searchsorted.Tensor searchsorted.Scalar", search_sorted},
      {"bucketize.Tensor bucketize.Scalar", bucketize},
      {"cumsum", running(Combine::Add)},
      {"cumprod", running(Combine::Multiply)},
      {"_logcumsumexp", log_of_running_sum},
      {"_cummax_helper", running_extreme("GE")},
      {"_cummin_helper", running_extreme("LE")},
      {"cumprod_backward", running_product_gradient},
  });
}

}  // namespace tessera::xla
