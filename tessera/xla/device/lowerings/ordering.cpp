// Operators that put elements in order, and running operators along a dimension.
#include "tessera/xla/device/dimensions.h"
#include "tessera/xla/device/elements.h"
#include "tessera/xla/device/views.h"
#include "tessera/xla/graph/scan.h"

namespace tessera::xla {
namespace {

using hlo::fixed;
using hlo::minus;
using hlo::plus;
using hlo::select;
using hlo::times;

hlo::Order order_of(const Call& call, size_t descending) {
  return call.flag(descending) ? hlo::Order::Descending : hlo::Order::Ascending;
}

void sort(Call& call) {
  const auto x = call.value(0), listed = with_a_dimension(x);
  const auto [values, places] = hlo::sort(listed, wrapped(call.integer(2), listed.rank()), order_of(call, 3));
  call.give(std::vector{hlo::reshape(values, x.sizes()), hlo::reshape(places, x.sizes())});
}

void topk(Call& call) {
  const auto x = with_a_dimension(call.value(0));
  const auto d = wrapped(call.integer(2), x.rank());
  const auto [values, places] = hlo::sort(x, d, order_of(call, 3));
  const auto first = [&](const Value& all) { return hlo::reshape(hlo::slice(all, d, 0, call.integer(1)), call.out()->sizes()); };
  call.give(std::vector{first(values), first(places)});
}

/// One element of a sorted dimension for each row.
struct Picked {
  Value value, place;
};
Picked picked(const Value& values, const Value& places, int64_t d, const Value& which) {
  const auto here = hlo::compare("EQ", hlo::iota({at::kLong, values.sizes()}, d), spread(which, values, {d}));
  // All others give way to the one, also where it is NaN or infinite.
  return {hlo::maximum(select(here, values, hlo::broadcast(hlo::lowest(values.element()), values.sizes(), {})), {d}),
          hlo::sum(select(here, places, fixed(places, 0)), {d})};
}

/// `which` gives for the sorted values the place to pick.
template <class Which>
void pick(Call& call, const Value& x, int64_t d, bool keep, const Which& which) {
  const auto [values, places] = hlo::sort(x, d, hlo::Order::Ascending);
  const auto [value, place] = picked(values, places, d, which(values));
  auto sizes = x.sizes();
  if (keep) {
    sizes[static_cast<size_t>(d)] = 1;
  } else {
    sizes.erase(sizes.begin() + d);
  }
  if (call.tensor(0).dim() == 0) sizes.clear();
  call.give(std::vector{hlo::reshape(value, sizes), hlo::reshape(place, sizes)});
}

void kth_value(Call& call) {
  const auto x = with_a_dimension(call.value(0));
  const auto d = wrapped(call.integer(2), x.rank());
  TORCH_CHECK(call.integer(1) >= 1 && call.integer(1) <= x.sizes()[static_cast<size_t>(d)],
              "kthvalue: selected number k out of range for dimension ", d);
  pick(call, x, d, call.flag(3), [&](const Value& sorted) {
    auto sizes = sorted.sizes();
    sizes.erase(sizes.begin() + d);
    return hlo::broadcast(hlo::constant(call.integer(1) - 1, at::kLong), sizes, {});
  });
}

enum class WithNan { Median, Ignored };

/// The lower one of two in the middle. Sorted, NaN comes last: there the middle is among the numbers, or the first NaN.
Value middle_of(const Value& sorted, int64_t d, WithNan nan) {
  const auto size = sorted.sizes()[static_cast<size_t>(d)];
  const auto is_number = hlo::convert(
      c10::isFloatingType(sorted.element()) ? hlo::compare("EQ", sorted, sorted) : fixed(hlo::convert(sorted, at::kBool), 1), at::kLong);
  const auto numbers = hlo::sum(is_number, {d}), one = fixed(numbers, 1), two = fixed(numbers, 2), zero = fixed(numbers, 0);
  if (nan == WithNan::Ignored) return hlo::largest(hlo::over(minus(numbers, one), two), zero);
  return select(hlo::compare("EQ", numbers, fixed(numbers, size)), fixed(numbers, (size - 1) / 2), numbers);
}

Kernel median_along(const char* name, WithNan nan) {
  return {name, [=](Call& call) {
            const auto x = with_a_dimension(call.value(0));
            const auto d = wrapped(call.integer(1), x.rank());
            TORCH_CHECK(x.sizes()[static_cast<size_t>(d)] > 0, "median: expected dimension ", d, " to have non-zero size");
            pick(call, x, d, call.flag(2), [&](const Value& sorted) { return middle_of(sorted, d, nan); });
          }};
}

Kernel median(const char* name, WithNan nan) {
  return {name, [=](Call& call) {
            if (call.tensor(0).numel() == 0) throw NotLowered();
            const auto [values, places] = hlo::sort(hlo::flat(call.value(0)), 0, hlo::Order::Ascending);
            call.give(picked(values, places, 0, middle_of(values, 0, nan)).value);
          }};
}

/// How many of the sorted numbers come before each value.
void give_counts(Call& call, const Value& sorted, const Value& values, bool right, bool as_int) {
  // Broadcasts sorted rows against the values, which get one more dimension.
  auto pairs = values.sizes();
  const auto rank = values.rank();
  pairs.push_back(sorted.sizes().back());
  const auto all = hlo::broadcast(values, pairs, all_dimensions(rank));
  auto row_dimensions = all_dimensions(sorted.rank() - 1);
  row_dimensions.push_back(rank);
  const auto rows = hlo::broadcast(sorted, pairs, row_dimensions);
  const auto before = hlo::opposite(hlo::compare(right ? "GT" : "GE", rows, all));
  call.give(hlo::sum(hlo::convert(before, as_int ? at::kInt : at::kLong), {rank}));
}

void search_sorted(Call& call) {
  const auto lists = call.tensor(0).sizes();
  if (lists.size() != 1) {
    const auto values = call[1].isTensor() ? call.tensor(1).sizes() : at::IntArrayRef();
    TORCH_CHECK(!lists.empty() && lists.size() == values.size() && lists.slice(0, lists.size() - 1) == values.slice(0, lists.size() - 1),
                "searchsorted: boundaries must have 1 dimension, or all but the last as the values have them, got ", lists, " and ", values);
  }
  const auto element = common_type(call);
  auto sorted = call.value(0, element);
  if (call.has(5)) sorted = hlo::convert(read(call.tensor(0).gather(-1, call.tensor(5))), element);
  const bool is_right_side = call.has(4) && call[4].toStringView() == "right", right = call.flag(3) || is_right_side;
  give_counts(call, sorted, call.value(1, element), right, call.flag(2));
}

void bucketize(Call& call) {
  TORCH_CHECK(call.tensor(1).dim() == 1, "bucketize: boundaries must have 1 dimension, got ", call.tensor(1).dim());
  const auto element = common_type(call);
  give_counts(call, call.value(1, element), call.value(0, element), call.flag(3), call.flag(2));
}

// --- from the begin to the end ---

Kernel running(const char* name, Combine combine) {
  return {name, [=](Call& call) {
            const auto x = call.wide_value(0);
            const auto d = call.integer(1);
            call.give(hlo::convert(x.rank() ? hlo::running(x, wrapped(d, x.rank()), combine) : x, call.result_type()));
          }};
}

void log_of_running_sum(Call& call) {
  const auto x = call.wide_value(0);
  const auto d = call.integer(1);
  if (x.rank() == 0) return call.give(hlo::convert(x, call.result_type()));
  const auto fill = hlo::lowest(x.element());
  const auto result = hlo::scan({x}, wrapped(d, x.rank()), {fill}, [](const auto& earlier, const auto& later) {
    const auto &a = earlier[0], &b = later[0], large = hlo::largest(a, b);
    const auto sum = plus(large, hlo::log_plus_one(hlo::exponential(hlo::negated(hlo::magnitude(minus(a, b))))));
    const auto is_infinite = hlo::compare("EQ", hlo::magnitude(large), fixed(large, std::numeric_limits<double>::infinity()));
    return std::vector{select(is_infinite, large, sum)};
  });
  call.give(hlo::convert(result[0], call.result_type()));
}

/// The last of equal ones counts.
Kernel running_extreme(const char* name, const char* direction) {
  return {name, [=](Call& call) {
            const auto x = with_a_dimension(call.value(0));
            const auto d = wrapped(call.integer(3), x.rank());
            const auto fill = direction == std::string_view("GE") ? hlo::lowest(x.element()) : hlo::highest(x.element());
            const auto result =
                hlo::scan({x, hlo::iota({at::kLong, x.sizes()}, d)}, d, {fill, hlo::constant(int64_t{0}, at::kLong)},
                          [&](const auto& earlier, const auto& later) {
                            auto wins = hlo::compare(direction, later[0], earlier[0]);
                            if (c10::isFloatingType(x.element()))
                              wins = hlo::either(hlo::is_nan(later[0]), hlo::both(wins, hlo::opposite(hlo::is_nan(earlier[0]))));
                            return std::vector{select(wins, later[0], earlier[0]), select(wins, later[1], earlier[1])};
                          });
            call.give(std::vector{hlo::reshape(result[0], call.tensor(0).sizes()), hlo::reshape(result[1], call.tensor(0).sizes())});
          }};
}

/// The gradient of x[k] is what all products before it are, times the sum over later gradients with the products in between: that sum is a
/// scan from the end, of numbers that are multiplied and then added to. So no number divides, and zeros are as others.
void running_product_gradient(Call& call) {
  const auto g = call.value(0), x = call.value(1, g.element());
  const auto named = call.integer(2);
  if (x.rank() == 0) return call.give(g);
  const auto d = wrapped(named, x.rank());
  const auto size = x.sizes()[static_cast<size_t>(d)];
  if (size == 0) return call.give(g);
  const auto one = hlo::constant(int64_t{1}, x.element()), zero = hlo::constant(int64_t{0}, x.element());
  const auto before = hlo::running(hlo::shifted(x, d, 1, one), d, Combine::Multiply);
  const auto next = hlo::reverse(hlo::shifted(x, d, -1, one), {d});
  const auto sums = hlo::scan({next, hlo::reverse(g, {d})}, d, {one, zero}, [](const auto& earlier, const auto& later) {
    return std::vector{times(earlier[0], later[0]), plus(later[1], times(later[0], earlier[1]))};
  });
  call.give(times(before, hlo::reverse(sums[1], {d})));
}

}  // namespace

void register_ordering() {
  const Kernel kernels[] = {
      {"sort.stable", sort},
      {"topk", topk},
      {"kthvalue", kth_value},
      median("median", WithNan::Median),
      median("nanmedian", WithNan::Ignored),
      median_along("median.dim", WithNan::Median),
      median_along("nanmedian.dim", WithNan::Ignored),
      {"searchsorted.Tensor", search_sorted},
      {"searchsorted.Scalar", search_sorted},
      {"bucketize.Tensor", bucketize},
      {"bucketize.Scalar", bucketize},
      running("cumsum", Combine::Add),
      running("cumprod", Combine::Multiply),
      {"_logcumsumexp", log_of_running_sum},
      running_extreme("_cummax_helper", "GE"),
      running_extreme("_cummin_helper", "LE"),
      {"cumprod_backward", running_product_gradient},
  };
  add_kernels(kernels);
}

}  // namespace tessera::xla
