// Operators that make one element of many: sums, maxima, softmax, losses, norms, scans.
#include <ATen/WrapDimUtils.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "tessera/xla/device/kernels.h"
#include "tessera/xla/device/views.h"
#include "tessera/xla/graph/arithmetic.h"

namespace tessera::xla {
namespace {

using hlo::plus;
using hlo::minus;
using hlo::times;
using hlo::over;
using hlo::fixed;
using hlo::like;
using hlo::wide;

/// The dimensions that argument `i` names, from 0 up; all if it names none.
Sizes dimensions(const Call& call, size_t i, int64_t rank) {
  auto named = i < call.arguments() && call.has(i) ? call.integers(i) : Sizes{};
  if (named.empty()) {
    named.resize(static_cast<size_t>(rank));
    std::iota(named.begin(), named.end(), 0);
  }
  for (auto& d : named) d = at::maybe_wrap_dim(d, rank);
  std::ranges::sort(named);
  if (rank == 0) named.clear();
  return named;
}

Sizes kept_sizes(Sizes sizes, const Sizes& reduced) {
  for (const auto d : reduced) sizes[static_cast<size_t>(d)] = 1;
  return sizes;
}

/// As wide again as `x`, of which it is a reduction.
Value spread(const Value& reduced, const Value& x, const Sizes& over_dimensions) {
  return hlo::expand(hlo::reshape(reduced, kept_sizes(x.sizes(), over_dimensions)), x.sizes());
}

int64_t count_of(const Value& x, const Sizes& dimensions) {
  int64_t count = 1;
  for (const auto d : dimensions) count *= x.sizes()[static_cast<size_t>(d)];
  return count;
}

Value mean_of(const Value& x, const Sizes& dimensions) {
  const auto sum = hlo::sum(x, dimensions);
  return over(sum, fixed(sum, static_cast<double>(count_of(x, dimensions))));
}

Value maybe_kept(const Value& reduced, const Value& x, const Sizes& dimensions, bool keep) {
  return keep ? hlo::reshape(reduced, kept_sizes(x.sizes(), dimensions)) : reduced;
}

template <class Reduce>
void reduce_to_result(Call& call, size_t dims, size_t keep, const Reduce& reduce) {
  const auto x = call.value(0, wide(call.result_type()));
  const auto over_dimensions = dimensions(call, dims, x.rank());
  const bool kept = keep < call.arguments() && call[keep].isBool() && call.flag(keep);
  call.give(hlo::convert(maybe_kept(reduce(x, over_dimensions), x, over_dimensions, kept), call.result_type()));
}

void sum(Call& call) { reduce_to_result(call, 1, 2, [](const Value& x, const Sizes& d) { return hlo::sum(x, d); }); }
void mean(Call& call) { reduce_to_result(call, 1, 2, [](const Value& x, const Sizes& d) { return mean_of(x, d); }); }
void amax(Call& call) { reduce_to_result(call, 1, 2, [](const Value& x, const Sizes& d) { return hlo::maximum(x, d); }); }
void amin(Call& call) {
  reduce_to_result(call, 1, 2, [](const Value& x, const Sizes& d) { return hlo::reduce(x, Combine::Min, hlo::highest(x.element()), d); });
}
void largest(Call& call) { reduce_to_result(call, 9, 9, [](const Value& x, const Sizes& d) { return hlo::maximum(x, d); }); }
void smallest(Call& call) {
  reduce_to_result(call, 9, 9, [](const Value& x, const Sizes& d) { return hlo::reduce(x, Combine::Min, hlo::highest(x.element()), d); });
}
void product(Call& call) {
  reduce_to_result(call, 1, 2, [](const Value& x, const Sizes& d) { return hlo::reduce(x, Combine::Multiply, hlo::constant(int64_t{1}, x.element()), d); });
}

void any_or_all(Call& call, Combine combine) {
  const auto x = call.value(0, at::kBool);
  const bool has_dimension = call.arguments() > 1;
  const auto d = has_dimension ? dimensions(call, 1, x.rank()) : dimensions(call, 9, x.rank());
  const auto reduced = hlo::reduce(x, combine, hlo::constant(int64_t{combine == Combine::And}, at::kBool), d);
  call.give(maybe_kept(reduced, x, d, call.arguments() > 2 && call.flag(2)));
}
void any(Call& call) { any_or_all(call, Combine::Or); }
void all(Call& call) { any_or_all(call, Combine::And); }

/// Where the first of the extreme values stands.
Value place_of(const Value& x, const Value& extreme, int64_t d) {
  const auto places = hlo::iota({at::kLong, x.sizes()}, d);
  const auto there = hlo::compare("EQ", x, spread(extreme, x, {d}));
  const auto beyond = hlo::broadcast(hlo::highest(at::kLong), x.sizes(), {});
  return hlo::reduce(hlo::select(there, places, beyond), Combine::Min, hlo::highest(at::kLong), {d});
}

void arg_extreme(Call& call, bool largest) {
  auto x = read(call.tensor(0));
  int64_t d = 0;
  const bool flat = !call.has(1);
  if (flat) {
    x = hlo::reshape(x, {count_of(x, dimensions(call, 9, x.rank()))});
  } else {
    d = at::maybe_wrap_dim(call.integer(1), x.rank());
  }
  if (x.rank() == 0) x = hlo::reshape(x, {1});
  const auto extreme = largest ? hlo::maximum(x, {d}) : hlo::reduce(x, Combine::Min, hlo::highest(x.element()), {d});
  const auto place = place_of(x, extreme, d);
  call.give(call.flag(2) && !flat ? hlo::reshape(place, kept_sizes(x.sizes(), {d})) : hlo::reshape(place, call.out() ? call.out()->sizes() : c10::IntArrayRef{}));
}
void argmax(Call& call) { arg_extreme(call, true); }
void argmin(Call& call) { arg_extreme(call, false); }

void extreme_along(Call& call, bool largest) {
  auto x = read(call.tensor(0));
  if (x.rank() == 0) x = hlo::reshape(x, {1});
  const auto d = at::maybe_wrap_dim(call.integer(1), x.rank());
  const auto extreme = largest ? hlo::maximum(x, {d}) : hlo::reduce(x, Combine::Min, hlo::highest(x.element()), {d});
  const auto sizes = call.out(0)->sizes();
  call.give(std::vector{hlo::reshape(extreme, sizes), hlo::reshape(place_of(x, extreme, d), sizes)});
}
void max_along(Call& call) { extreme_along(call, true); }
void min_along(Call& call) { extreme_along(call, false); }

void variance(Call& call, bool root) {
  const auto x = call.value(0, wide(call.result_type()));
  const auto d = dimensions(call, 1, x.rank());
  const auto correction = call.has(2) ? call.number(2) : 1.0;
  const auto centred = minus(x, spread(mean_of(x, d), x, d));
  auto result = hlo::sum(times(centred, centred), d);
  result = over(result, fixed(result, std::max(0.0, static_cast<double>(count_of(x, d)) - correction)));
  if (root) result = hlo::unary("sqrt", result);
  call.give(hlo::convert(maybe_kept(result, x, d, call.flag(3)), call.result_type()));
}
void var(Call& call) { variance(call, false); }
void std_deviation(Call& call) { variance(call, true); }

Value norm_of(const Value& x, double p, const Sizes& d) {
  const auto size = hlo::unary("abs", x);
  if (p == 2) return hlo::unary("sqrt", hlo::sum(times(x, x), d));
  if (p == 1) return hlo::sum(size, d);
  if (p == 0) return hlo::sum(hlo::convert(hlo::compare("NE", x, like(x, 0)), x.element()), d);
  if (std::isinf(p)) return p > 0 ? hlo::maximum(size, d) : hlo::reduce(size, Combine::Min, hlo::highest(x.element()), d);
  const auto sum = hlo::sum(hlo::binary("power", size, fixed(size, p)), d);
  return hlo::binary("power", sum, fixed(sum, 1 / p));
}

void vector_norm(Call& call) {
  const auto x = call.value(0, wide(call.result_type()));
  const auto d = dimensions(call, 2, x.rank());
  call.give(hlo::convert(maybe_kept(norm_of(x, call.number(1), d), x, d, call.flag(3)), call.result_type()));
}
void norm(Call& call) {
  const auto x = call.value(0, wide(call.result_type()));
  const auto d = dimensions(call, 2, x.rank());
  call.give(hlo::convert(maybe_kept(norm_of(x, call.has(1) ? call.number(1) : 2, d), x, d, call.arguments() > 3 && call.flag(3)), call.result_type()));
}

// --- softmax ---

struct Softmax {
  Value x, shifted, exponentials, sum;
  Sizes d;
};
Softmax softmax_parts(Call& call) {
  Softmax s;
  s.x = call.value(0, wide(call.result_type()));
  s.d = s.x.rank() ? Sizes{at::maybe_wrap_dim(call.integer(1), s.x.rank())} : Sizes{};
  s.shifted = minus(s.x, spread(hlo::maximum(s.x, s.d), s.x, s.d));
  s.exponentials = hlo::unary("exponential", s.shifted);
  s.sum = spread(hlo::sum(s.exponentials, s.d), s.x, s.d);
  return s;
}
void softmax(Call& call) {
  const auto s = softmax_parts(call);
  call.give(hlo::convert(over(s.exponentials, s.sum), call.result_type()));
}
void log_softmax(Call& call) {
  const auto s = softmax_parts(call);
  call.give(hlo::convert(minus(s.shifted, hlo::unary("log", s.sum)), call.result_type()));
}
void softmax_gradient(Call& call) {
  const auto element = wide(call.result_type());
  const auto g = call.value(0, element), y = call.value(1, element);
  const Sizes d = y.rank() ? Sizes{at::maybe_wrap_dim(call.integer(2), y.rank())} : Sizes{};
  const auto weighted = times(g, y);
  call.give(hlo::convert(minus(weighted, times(y, spread(hlo::sum(weighted, d), y, d))), call.result_type()));
}
void log_softmax_gradient(Call& call) {
  const auto element = wide(call.result_type());
  const auto g = call.value(0, element), y = call.value(1, element);
  const Sizes d = y.rank() ? Sizes{at::maybe_wrap_dim(call.integer(2), y.rank())} : Sizes{};
  call.give(hlo::convert(minus(g, times(hlo::unary("exponential", y), spread(hlo::sum(g, d), y, d))), call.result_type()));
}

// --- losses ---

enum : int64_t { kNone, kMean, kSum };

void give_reduced(Call& call, const Value& each, int64_t reduction) {
  Sizes all(static_cast<size_t>(each.rank()));
  std::iota(all.begin(), all.end(), 0);
  call.give(hlo::convert(reduction == kNone ? each : reduction == kMean ? mean_of(each, all) : hlo::sum(each, all), call.result_type()));
}

void mse_loss(Call& call) {
  const auto element = wide(call.result_type());
  const auto difference = minus(call.value(0, element), call.value(1, element));
  give_reduced(call, times(difference, difference), call.integer(2));
}

Value loss_gradient(const Value& g, const Value& x, const Value& slope, int64_t reduction) {
  auto gradient = times(hlo::expand(g, x.sizes()), slope);
  if (reduction == kMean) {
    Sizes all(static_cast<size_t>(x.rank()));
    std::iota(all.begin(), all.end(), 0);
    gradient = over(gradient, fixed(gradient, static_cast<double>(count_of(x, all))));
  }
  return gradient;
}

void mse_loss_gradient(Call& call) {
  const auto type = call.result_type();
  const auto element = wide(type);
  const auto x = call.value(1, element), difference = minus(x, call.value(2, element));
  call.give(hlo::convert(loss_gradient(call.value(0, element), x, times(difference, like(x, 2)), call.integer(3)), type));
}

/// The classes that are asked for, as ones among zeros, without those that are ignored; and each row's weight.
struct Targets {
  Value chosen;   // of the shape of x
  Value weights;  // of the shape of the targets
};
Targets targets_of(Call& call, const Value& x, const Value& target, size_t weight, int64_t ignored) {
  const int64_t classes = x.rank() == 1 ? 0 : 1;
  Sizes places;
  for (int64_t i = 0; i < x.rank(); i++) {
    if (i != classes) places.push_back(i);
  }
  const auto rows = hlo::broadcast(target, x.sizes(), places);
  const auto valid = hlo::compare("NE", target, fixed(target, static_cast<double>(ignored)));
  const auto equal = hlo::compare("EQ", hlo::iota({at::kLong, x.sizes()}, classes), rows);
  const auto chosen = hlo::convert(hlo::binary("and", equal, hlo::broadcast(valid, x.sizes(), places)), x.element());
  if (!call.has(weight)) return {chosen, hlo::convert(valid, x.element())};
  const auto weighted = times(chosen, hlo::broadcast(call.value(weight, x.element()), x.sizes(), Sizes{classes}));
  return {weighted, hlo::sum(weighted, {classes})};
}

void nll_loss(Call& call) {
  const auto type = call.result_type();
  const auto x = call.value(0, wide(type)), target = read(call.tensor(1));
  const auto reduction = call.integer(3);
  const auto [chosen, weights] = targets_of(call, x, target, 2, call.integer(4));
  const auto each = hlo::unary("negate", hlo::sum(times(x, chosen), {x.rank() == 1 ? 0 : 1}));
  Sizes all(static_cast<size_t>(each.rank()));
  std::iota(all.begin(), all.end(), 0);
  const auto total = hlo::sum(weights, all);
  if (reduction == kNone) {
    call.give(std::vector{hlo::convert(each, type), hlo::convert(hlo::full(0, {x.element(), {}}), type)});
    return;
  }
  const auto sum = hlo::sum(each, all);
  call.give(std::vector{hlo::convert(reduction == kMean ? over(sum, total) : sum, type), hlo::convert(total, type)});
}

void nll_loss_gradient(Call& call) {
  const auto type = call.result_type();
  const auto element = wide(type);
  const auto x = call.value(1, element), target = read(call.tensor(2));
  const auto reduction = call.integer(4);
  const auto chosen = targets_of(call, x, target, 3, call.integer(5)).chosen;
  auto g = call.value(0, element);
  if (reduction == kMean) g = over(g, call.value(6, element));
  Sizes places;
  for (int64_t i = 0; i < x.rank(); i++) {
    if (x.rank() > 1 && i != 1) places.push_back(i);
  }
  const auto rows = reduction == kNone ? hlo::broadcast(g, x.sizes(), places) : hlo::broadcast(g, x.sizes(), {});
  call.give(hlo::convert(hlo::unary("negate", times(rows, chosen)), type));
}

// --- norms of layers ---

void layer_norm(Call& call) {
  const auto type = call.tensor(0).scalar_type();
  const auto x = call.value(0, wide(type));
  const auto normalized = static_cast<int64_t>(call.integers(1).size());
  Sizes d, rows;
  for (int64_t i = 0; i < x.rank(); i++) (i < x.rank() - normalized ? rows : d).push_back(i);
  const auto average = mean_of(x, d);
  const auto centred = minus(x, spread(average, x, d));
  const auto variance = mean_of(times(centred, centred), d);
  const auto inverse = hlo::unary("rsqrt", plus(variance, fixed(variance, call.number(4))));
  auto y = times(centred, spread(inverse, x, d));
  if (call.has(2)) y = times(y, hlo::expand(call.value(2, x.element()), x.sizes()));
  if (call.has(3)) y = plus(y, hlo::expand(call.value(3, x.element()), x.sizes()));
  const auto kept = kept_sizes(x.sizes(), d);
  call.give(std::vector{hlo::convert(y, type), hlo::reshape(average, kept), hlo::reshape(inverse, kept)});
}

void layer_norm_gradient(Call& call) {
  const auto type = call.tensor(1).scalar_type();
  const auto element = wide(type);
  const auto g = call.value(0, element), x = call.value(1, element);
  const auto normalized = static_cast<int64_t>(call.integers(2).size());
  Sizes d, rows;
  for (int64_t i = 0; i < x.rank(); i++) (i < x.rank() - normalized ? rows : d).push_back(i);
  const auto mean = hlo::expand(call.value(3, element), x.sizes()), inverse = hlo::expand(call.value(4, element), x.sizes());
  const auto normal = times(minus(x, mean), inverse);
  const auto mask = call[7].toBoolList();
  std::vector<Value> results(3);
  if (mask[0]) {
    const auto scaled = call.has(5) ? times(g, hlo::expand(call.value(5, element), x.sizes())) : g;
    const auto along = plus(spread(mean_of(scaled, d), x, d), times(normal, spread(mean_of(times(scaled, normal), d), x, d)));
    results[0] = hlo::convert(times(inverse, minus(scaled, along)), type);
  }
  if (mask[1] && call.has(5)) results[1] = hlo::convert(hlo::sum(times(g, normal), rows), call.tensor(5).scalar_type());
  if (mask[2] && call.has(6)) results[2] = hlo::convert(hlo::sum(g, rows), call.tensor(6).scalar_type());
  call.give(results);
}

const Kernel kReductions[] = {
    {"sum.IntList_out", sum},
    {"mean.out", mean},
    {"amax.out", amax},
    {"amin.out", amin},
    {"max", largest},
    {"min", smallest},
    {"prod", [](Call& call) { reduce_to_result(call, 9, 9, [](const Value& x, const Sizes& d) { return hlo::reduce(x, Combine::Multiply, hlo::constant(int64_t{1}, x.element()), d); }); }},
    {"prod.int_out", product},
    {"any.out", any},
    {"any.all_out", any},
    {"all.out", all},
    {"all.all_out", all},
    {"argmax.out", argmax},
    {"argmin.out", argmin},
    {"max.dim_max", max_along},
    {"min.dim_min", min_along},
    {"var.correction", var},
    {"std.correction", std_deviation},
    {"linalg_vector_norm.out", vector_norm},
    {"norm.out", norm},
    {"_softmax.out", softmax},
    {"_softmax_backward_data.out", softmax_gradient},
    {"_log_softmax.out", log_softmax},
    {"_log_softmax_backward_data.out", log_softmax_gradient},
    {"mse_loss.out", mse_loss},
    {"mse_loss_backward", mse_loss_gradient},
    {"nll_loss_forward.output", nll_loss},
    {"nll_loss_backward.grad_input", nll_loss_gradient},
    {"native_layer_norm", layer_norm},
    {"native_layer_norm_backward", layer_norm_gradient},
};

}  // namespace

void register_reductions() { add_kernels(kReductions); }

}  // namespace tessera::xla
