// Activations and their gradients.
#include <ATen/WrapDimUtils.h>

#include <cmath>
#include <numbers>

#include "tessera/xla/device/elements.h"
#include "tessera/xla/device/views.h"

namespace tessera::xla {
namespace {

using hlo::both;
using hlo::compare;
using hlo::exponential;
using hlo::fixed;
using hlo::is_above;
using hlo::is_below;
using hlo::logistic;
using hlo::minus;
using hlo::over;
using hlo::plus;
using hlo::select;
using hlo::times;

bool is_tanh_form(const Elements& x, size_t i) {
  return x.call()[i].toStringView() == "tanh";
}

constexpr double kRootOfTwoOverPi = std::numbers::sqrt2 * std::numbers::inv_sqrtpi, kCubic = 0.044715;

/// The normal distribution function of x, to all digits also where it is small.
Value normal_below(const Value& x) {
  return times(fixed(x, 0.5), hlo::unary("chlo.erfc", times(x, fixed(x, -1 / std::numbers::sqrt2))));
}

Value gelu(const Elements& e) {
  const auto x = e[0], one = fixed(x, 1), half = times(fixed(x, 0.5), x);
  if (!is_tanh_form(e, 1)) return times(x, normal_below(x));
  const auto inner = times(fixed(x, kRootOfTwoOverPi), plus(x, times(fixed(x, kCubic), times(x, times(x, x)))));
  return times(half, plus(one, hlo::unary("tanh", inner)));
}

Value gelu_gradient(const Elements& e) {
  const auto g = e[0], x = e[1], one = fixed(x, 1), half = fixed(x, 0.5);
  if (is_tanh_form(e, 2)) {
    const auto square = times(x, x), beta = fixed(x, kRootOfTwoOverPi);
    const auto tanh = hlo::unary("tanh", times(beta, plus(x, times(fixed(x, kCubic), times(x, square)))));
    const auto slope = times(beta, plus(one, times(fixed(x, 3 * kCubic), square)));
    const auto right = times(times(times(half, x), minus(one, times(tanh, tanh))), slope);
    return times(g, plus(times(half, plus(one, tanh)), right));
  }
  const auto pdf = times(fixed(x, std::numbers::inv_sqrtpi / std::numbers::sqrt2), exponential(times(fixed(x, -0.5), times(x, x))));
  return times(g, plus(normal_below(x), times(x, pdf)));
}

Value silu_gradient(const Elements& e) {
  const auto g = e[0], x = e[1], s = logistic(x), one = fixed(x, 1);
  return times(g, times(s, plus(one, times(x, minus(one, s)))));
}

/// log(1 + exp(x)).
Value soft_positive(const Value& x) {
  return plus(hlo::largest(x, fixed(x, 0)), hlo::log_plus_one(exponential(hlo::negated(hlo::magnitude(x)))));
}

Value mish(const Elements& e) {
  return times(e[0], hlo::unary("tanh", soft_positive(e[0])));
}

Value mish_gradient(const Elements& e) {
  const auto g = e[0], x = e[1], one = fixed(x, 1), tanh = hlo::unary("tanh", soft_positive(x));
  return times(g, plus(tanh, times(times(x, logistic(x)), minus(one, times(tanh, tanh)))));
}

Value leaky(const Value& x, const Value& slope) {
  return select(is_above(x, fixed(x, 0)), x, times(x, slope));
}
Value leaky_gradient(const Value& g, const Value& x, const Value& slope) {
  return select(is_above(x, fixed(x, 0)), g, times(g, slope));
}

Value elu(const Elements& e) {
  const auto x = e[0], alpha = e.number(1), scale = e.number(2), input_scale = e.number(3);
  const auto low = times(times(alpha, scale), hlo::unary("exponential_minus_one", times(x, input_scale)));
  return select(is_above(x, fixed(x, 0)), times(x, scale), low);
}

Value elu_gradient(const Elements& e) {
  const auto g = e[0], alpha = e.number(1), scale = e.number(2), input_scale = e.number(3), x = e[5];
  const auto low = e.call().flag(4) ? times(input_scale, plus(x, times(alpha, scale)))
                                    : times(times(input_scale, times(alpha, scale)), exponential(times(x, input_scale)));
  return times(g, select(compare("LE", x, fixed(x, 0)), low, scale));
}

Value softplus(const Elements& e) {
  const auto x = e[0], scaled_x = times(x, e.number(1));
  return select(is_above(scaled_x, e.number(2)), x, over(hlo::log_plus_one(exponential(scaled_x)), e.number(1)));
}

Value softplus_gradient(const Elements& e) {
  const auto g = e[0], scaled_x = times(e[1], e.number(2));
  return select(is_above(scaled_x, e.number(3)), g, times(g, logistic(scaled_x)));
}

/// The gradient where x lies between two numbers, else 0, also for NaN.
Value inside(const Value& g, const Value& x, const Value& low, const Value& high) {
  return select(both(is_above(x, low), is_below(x, high)), g, fixed(g, 0));
}

/// The same, but NaN gets the gradient.
Value not_outside(const Value& g, const Value& x, const Value& low, const Value& high) {
  return select(hlo::either(compare("LE", x, low), compare("GE", x, high)), fixed(g, 0), g);
}

Value hard_shrunk(const Elements& e, const Value& kept) {
  const auto x = e[e.call().arguments() - 2], limit = e.number(e.call().arguments() - 1);
  return select(both(compare("GE", x, hlo::negated(limit)), compare("LE", x, limit)), fixed(x, 0), kept);
}

Value soft_shrunk(const Elements& e) {
  const auto x = e[0], limit = e.number(1);
  const auto low = select(is_below(x, hlo::negated(limit)), plus(x, limit), times(x, fixed(x, 0)));
  return select(is_above(x, limit), minus(x, limit), low);
}

Value hard_logistic(const Value& x) {
  return over(hlo::smallest(hlo::largest(plus(x, fixed(x, 3)), fixed(x, 0)), fixed(x, 6)), fixed(x, 6));
}

Value hard_swish_gradient(const Elements& e) {
  const auto g = e[0], x = e[1], three = fixed(x, 3);
  const auto between = times(g, plus(over(x, three), fixed(x, 0.5)));
  return select(compare("LE", x, fixed(x, -3)), fixed(x, 0), select(is_below(x, three), between, g));
}

void log_sigmoid(Call& call) {
  const auto x = call.wide_value(0);
  const auto type = call.result_type();
  const auto nothing = hlo::broadcast(hlo::constant(0.0, type), {0}, {});  // a buffer of the CPU's kernel
  call.give(std::vector{hlo::convert(hlo::negated(soft_positive(hlo::negated(x))), type), nothing});
}

void log_sigmoid_gradient(Call& call) {
  call.give(hlo::convert(times(call.wide_value(0), logistic(hlo::negated(call.wide_value(1)))), call.result_type()));
}

std::pair<Value, Value> halves(const Value& x, int64_t d) {
  const auto half = x.sizes()[static_cast<size_t>(d)] / 2;
  return {hlo::slice(x, d, 0, half), hlo::slice(x, d, half, 2 * half)};
}

void gated(Call& call) {
  const auto x = call.wide_value(0);
  const auto [value, gate] = halves(x, at::maybe_wrap_dim(call.integer(1), x.rank()));
  call.give(hlo::convert(times(value, logistic(gate)), call.result_type()));
}

void gated_gradient(Call& call) {
  const auto g = call.wide_value(0), x = call.wide_value(1);
  const auto d = at::maybe_wrap_dim(call.integer(2), x.rank());
  const auto [value, gate] = halves(x, d);
  const auto open = logistic(gate);
  const Value parts[] = {times(g, open), times(times(g, value), times(open, minus(fixed(open, 1), open)))};
  call.give(hlo::convert(hlo::concatenate(parts, d), call.result_type()));
}

void prelu_gradient(Call& call) {
  const Elements e(call, hlo::wide(call.result_type()));
  const auto g = e[0], x = e[1], zero = fixed(x, 0);
  const auto type = call.result_type();
  const Value results[] = {hlo::convert(leaky_gradient(g, x, e[2]), type),
                           hlo::convert(select(is_above(x, zero), zero, times(g, x)), type)};
  call.give(results);
}

}  // namespace

void register_activations() {
  const Kernel kernels[] = {
      elementwise("relu", [](const Elements& x) { return hlo::largest(x[0], fixed(x[0], 0)); }),
      elementwise("threshold", [](const Elements& x) { return select(compare("LE", x[0], x[1]), x[2], x[0]); }),
      elementwise("threshold_backward", [](const Elements& x) { return select(compare("LE", x[1], x[2]), fixed(x[0], 0), x[0]); }),
      elementwise("gelu", gelu),
      elementwise("gelu_backward", gelu_gradient),
      elementwise("silu", [](const Elements& x) { return times(x[0], logistic(x[0])); }),
      elementwise("silu_backward", silu_gradient),
      elementwise("mish", mish),
      elementwise("mish_backward", mish_gradient),
      elementwise("sigmoid_backward", [](const Elements& x) { return times(x[0], times(x[1], minus(fixed(x[1], 1), x[1]))); }),
      elementwise("tanh_backward", [](const Elements& x) { return times(x[0], minus(fixed(x[1], 1), times(x[1], x[1]))); }),
      elementwise("leaky_relu", [](const Elements& x) { return leaky(x[0], x.number(1)); }),
      elementwise("leaky_relu_backward", [](const Elements& x) { return leaky_gradient(x[0], x[1], x.number(2)); }),
      elementwise("_prelu_kernel", [](const Elements& x) { return leaky(x[0], x[1]); }),
      {"_prelu_kernel_backward", prelu_gradient},
      elementwise("elu", elu),
      elementwise("elu_backward", elu_gradient),
      elementwise("softplus", softplus),
      elementwise("softplus_backward", softplus_gradient),
      {"log_sigmoid_forward", log_sigmoid},
      {"log_sigmoid_backward", log_sigmoid_gradient},
      elementwise("hardtanh", [](const Elements& x) { return hlo::smallest(hlo::largest(x[0], x[1]), x[2]); }),
      elementwise("hardtanh_backward", [](const Elements& x) { return not_outside(x[0], x[1], x[2], x[3]); }),
      elementwise("hardsigmoid", [](const Elements& x) { return hard_logistic(x[0]); }),
      elementwise("hardsigmoid_backward",
                  [](const Elements& x) { return inside(over(x[0], fixed(x[0], 6)), x[1], fixed(x[0], -3), fixed(x[0], 3)); }),
      elementwise("hardswish", [](const Elements& x) { return times(x[0], hard_logistic(x[0])); }),
      elementwise("hardswish_backward", hard_swish_gradient),
      elementwise("hardshrink", [](const Elements& x) { return hard_shrunk(x, x[0]); }),
      elementwise("hardshrink_backward", [](const Elements& x) { return hard_shrunk(x, x[0]); }),
      elementwise("softshrink", soft_shrunk),
      elementwise("softshrink_backward", [](const Elements& x) { return hard_shrunk(x, x[0]); }),
      {"glu", gated},
      {"glu_backward", gated_gradient},
  };
  add_kernels(kernels);
}

}  // namespace tessera::xla
