// Reductions (sums, extremes and their places, norms), and softmax.
#include <cmath>

#include "tessera/xla/device/dimensions.h"
#include "tessera/xla/device/elements.h"
#include "tessera/xla/device/views.h"

namespace tessera::xla {
namespace {

using Reduce = Value (*)(const Value&, const Sizes&);

bool flag_or_false(const Call& call, Place place) {
  return place && call.flag(*place);
}

Value maybe_kept(const Value& reduced, const Value& x, const Sizes& dimensions, bool keep) {
  return keep ? reshape(reduced, kept_sizes(x.sizes(), dimensions)) : reduced;
}

/// The type of the tensor that takes the result, else the type in argument `dtype`, else `otherwise`.
at::ScalarType type_or(const Call& call, Place dtype, at::ScalarType otherwise) {
  if (call.out()) return call.result_type();
  return dtype && call.has(*dtype) ? call[*dtype].toScalarType() : otherwise;
}

/// The type of a sum: long for integers of any type and for bool.
at::ScalarType sum_type(const Call& call) {
  const auto type = call.tensor(0).scalar_type();
  return c10::isIntegralType(type, true) ? at::kLong : type;
}

void give_reduced(Call& call, at::ScalarType type, Place dims, Place keep, const Reduce& reduce) {
  const auto x = call.value(0, hlo::wide(type));
  const auto d = dimensions(call, dims, x.rank());
  call.give(convert(maybe_kept(reduce(x, d), x, d, flag_or_false(call, keep)), type));
}

/// `dims` and `keep` are the indices of the arguments with the reduced dimensions and the flag that keeps them.
Lowering reduction(Place dims, Place keep, Reduce reduce) {
  return [=](Call& call) { give_reduced(call, call.result_type(), dims, keep, reduce); };
}
Lowering sum_like(Place dims, Place keep, Place dtype, Reduce reduce) {
  return [=](Call& call) { give_reduced(call, type_or(call, dtype, sum_type(call)), dims, keep, reduce); };
}

Value product_of(const Value& x, const Sizes& d) {
  return reduce(x, Combine::Multiply, hlo::constant(1, x.element()), d);
}
Value maximum_of(const Value& x, const Sizes& d) {
  return maximum(x, d);
}
Value sum_of(const Value& x, const Sizes& d) {
  return hlo::sum(x, d);
}
Value sum_of_numbers(const Value& x, const Sizes& d) {
  return hlo::sum(select(is_nan(x), 0, x), d);
}

Lowering truth(Place dims, Place keep, Combine combine) {
  return [=](Call& call) {
    const auto x = call.value(0, at::kBool);
    const auto d = dimensions(call, dims, x.rank());
    const auto reduced = reduce(x, combine, hlo::constant(int64_t{combine == Combine::And}, at::kBool), d);
    call.give(maybe_kept(reduced, x, d, flag_or_false(call, keep)));
  };
}

void count_nonzero(Call& call) {
  const auto x = convert(call.value(0, at::kBool), at::kLong);
  call.give(hlo::sum(x, dimensions(call, 1, x.rank())));
}

void trace(Call& call) {
  TORCH_CHECK(call.tensor(0).dim() == 2, "trace: expected a matrix, got ", call.tensor(0).dim(), " dimensions");
  const auto x = convert(read(call.tensor(0).diagonal()), type_or(call, {}, sum_type(call)));
  call.give(hlo::sum(x, {0}));
}

// --- extremes ---

Lowering extreme_of_all(const char* name, Reduce reduce) {
  return [=](Call& call) {
    TORCH_CHECK(call.tensor(0).numel() > 0, name, ": the tensor has no elements; give a dimension that has some");
    const auto x = hlo::flat(call.value(0));
    call.give(reduce(x, {0}));
  };
}

/// The place of the first extreme value. NaN is more extreme than all numbers.
Value place_of(const Value& x, const Value& extreme, int64_t d) {
  const auto places = hlo::iota({at::kLong, x.sizes()}, d);
  const auto there = compare("EQ", x, spread(extreme, x, {d})) | is_nan(x);
  const auto beyond = broadcast(hlo::highest(at::kLong), x.sizes(), {});
  return reduce(select(there, places, beyond), Combine::Min, hlo::highest(at::kLong), {d});
}

Lowering place_of_extreme(Reduce reduce) {
  return [=](Call& call) {
    auto x = call.value(0);
    const bool flat = !call.has(1);
    x = flat ? hlo::flat(x) : with_a_dimension(x);
    const auto d = flat ? 0 : wrapped(call.integer(1), x.rank());
    call.give(reshape(place_of(x, reduce(x, {d}), d), call.out()->sizes()));
  };
}

Lowering extreme_along(Reduce reduce) {
  return [=](Call& call) {
    const auto x = with_a_dimension(call.value(0));
    const auto d = wrapped(call.integer(1), x.rank());
    const auto extreme = reduce(x, {d});
    const auto sizes = call.out(0)->sizes();
    call.give({reshape(extreme, sizes), reshape(place_of(x, extreme, d), sizes)});
  };
}

void both_extremes(Call& call) {
  const auto x = call.value(0);
  const auto d = dimensions(call, 1, x.rank());
  const bool keep = flag_or_false(call, 2);
  call.give({maybe_kept(smallest_of(x, d), x, d, keep), maybe_kept(maximum_of(x, d), x, d, keep)});
}

// --- moments and norms ---

struct Moments {
  Value variance, mean;
};
Moments moments_of(const Call& call, const Value& x, const Sizes& d) {
  const auto correction = call.has(2) ? call.number(2) : 1.0;
  const auto mean = mean_of(x, d), centred = x - spread(mean, x, d), sum = hlo::sum(centred * centred, d);
  return {sum / std::max(0.0, static_cast<double>(count_of(x, d)) - correction), mean};
}

enum class Root { No, Yes };

void give_moments(Call& call, Root root, size_t results) {
  const auto type = call.result_type();
  const auto x = call.value(0, hlo::wide(type));
  const auto d = dimensions(call, 1, x.rank());
  const auto [variance, mean] = moments_of(call, x, d);
  std::vector<Value> all{root == Root::Yes ? hlo::root(variance) : variance, mean};
  all.resize(results);
  for (auto& value : all) value = convert(maybe_kept(value, x, d, call.flag(3)), type);
  call.give(all);
}

Value norm_of(const Value& x, double p, const Sizes& d) {
  const auto size = magnitude(x);
  if (p == 2) return root(hlo::sum(x * x, d));
  if (p == 1) return hlo::sum(size, d);
  if (p == 0) return hlo::sum(convert(compare("NE", x, 0), x.element()), d);
  if (std::isinf(p)) return p > 0 ? maximum(size, d) : smallest_of(size, d);
  const auto sum = hlo::sum(binary("power", size, fixed(size, p)), d);
  return binary("power", sum, fixed(sum, 1 / p));
}

void norm(Call& call) {
  const auto x = call.wide_value(0);
  const auto d = dimensions(call, 2, x.rank());
  call.give_rounded(maybe_kept(norm_of(x, call.has(1) ? call.number(1) : 2, d), x, d, flag_or_false(call, 3)));
}

// --- softmax ---

Sizes dimension_of(const Call& call, size_t i, const Value& x) {
  const auto named = call.integer(i);
  return x.rank() ? Sizes{wrapped(named, x.rank())} : Sizes{};
}

struct Softmax {
  Value below_maximum, exponentials, sum;
};
Softmax softmax_parts(const Call& call) {
  Softmax s;
  const auto x = call.wide_value(0);
  const auto d = dimension_of(call, 1, x);
  s.below_maximum = x - spread(maximum(x, d), x, d);
  s.exponentials = exponential(s.below_maximum);
  s.sum = spread(hlo::sum(s.exponentials, d), x, d);
  return s;
}
void softmax(Call& call) {
  const auto s = softmax_parts(call);
  call.give_rounded(s.exponentials / s.sum);
}
void log_softmax(Call& call) {
  const auto s = softmax_parts(call);
  call.give_rounded(s.below_maximum - logarithm(s.sum));
}
void softmax_gradient(Call& call) {
  const auto g = call.wide_value(0), y = call.wide_value(1), weighted = g * y;
  const auto d = dimension_of(call, 2, y);
  call.give_rounded(weighted - y * spread(hlo::sum(weighted, d), y, d));
}
void log_softmax_gradient(Call& call) {
  const auto g = call.wide_value(0), y = call.wide_value(1);
  const auto d = dimension_of(call, 2, y);
  call.give_rounded(g - exponential(y) * spread(hlo::sum(g, d), y, d));
}

}  // namespace

void register_reductions() {
  add_kernels({
      {"sum.dim_IntList", reduction(1, 2, sum_of)},
      {"mean.dim", reduction(1, 2, mean_of)},
      {"amax", reduction(1, 2, maximum_of)},
      {"amin", reduction(1, 2, smallest_of)},
      {"max", extreme_of_all("max", maximum_of)},
      {"min", extreme_of_all("min", smallest_of)},
      {"prod", sum_like({}, {}, 1, product_of)},
      {"prod.dim_int", sum_like(1, 2, 3, product_of)},
      {"nansum", sum_like(1, 2, 3, sum_of_numbers)},
      {"any", truth({}, {}, Combine::Or)},
      {"any.dim any.dims", truth(1, 2, Combine::Or)},
      {"all", truth({}, {}, Combine::And)},
      {"all.dim all.dims", truth(1, 2, Combine::And)},
      {"count_nonzero.dim_IntList", count_nonzero},
      {"trace", trace},
      {"argmax", place_of_extreme(maximum_of)},
      {"argmin", place_of_extreme(smallest_of)},
      {"max.dim", extreme_along(maximum_of)},
      {"min.dim", extreme_along(smallest_of)},
      {"aminmax", both_extremes},
      {"var.correction", [](Call& call) { give_moments(call, Root::No, 1); }},
      {"std.correction", [](Call& call) { give_moments(call, Root::Yes, 1); }},
      {"var_mean.correction", [](Call& call) { give_moments(call, Root::No, 2); }},
      {"std_mean.correction", [](Call& call) { give_moments(call, Root::Yes, 2); }},
      {"linalg_vector_norm norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype", norm},
      {"_softmax", softmax},
      {"_softmax_backward_data", softmax_gradient},
      {"_log_softmax", log_softmax},
      {"_log_softmax_backward_data", log_softmax_gradient},
  });
}

}  // namespace tessera::xla
