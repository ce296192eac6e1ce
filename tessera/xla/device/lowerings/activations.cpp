// Activations and their gradients.
#include <ATen/WrapDimUtils.h>

#include <numbers>

#include "tessera/xla/device/elements.h"

namespace tessera::xla {
namespace {

bool is_tanh_form(const Elements& x, size_t i) {
  return x.call()[i].toStringView() == "tanh";
}

constexpr double kRootOfTwoOverPi = std::numbers::sqrt2 * std::numbers::inv_sqrtpi, kCubic = 0.044715;

/// The cumulative distribution function of the standard normal distribution. Uses erfc, which is accurate even for very negative x.
Value normal_below(const Value& x) {
  return 0.5 * unary("chlo.erfc", x * (-1 / std::numbers::sqrt2));
}

Value gelu(const Elements& e) {
  const auto x = e[0], one = fixed(x, 1), half = 0.5 * x;
  if (!is_tanh_form(e, 1)) return x * normal_below(x);
  const auto inner = kRootOfTwoOverPi * (x + kCubic * (x * (x * x)));
  return half * (one + unary("tanh", inner));
}

Value gelu_gradient(const Elements& e) {
  const auto g = e[0], x = e[1], one = fixed(x, 1), half = fixed(x, 0.5);
  if (is_tanh_form(e, 2)) {
    const auto square = x * x, beta = fixed(x, kRootOfTwoOverPi);
    const auto tanh = unary("tanh", beta * (x + kCubic * (x * square)));
    const auto slope = beta * (one + 3 * kCubic * square);
    const auto right = half * x * (one - tanh * tanh) * slope;
    return g * (half * (one + tanh) + right);
  }
  const auto pdf = std::numbers::inv_sqrtpi / std::numbers::sqrt2 * exponential(-0.5 * (x * x));
  return g * (normal_below(x) + x * pdf);
}

Value silu_gradient(const Value& g, const Value& x) {
  const auto s = logistic(x), one = fixed(x, 1);
  return g * (s * (one + x * (one - s)));
}

/// log(1 + exp(x)).
Value soft_positive(const Value& x) {
  return largest(x, 0) + log_plus_one(exponential(-magnitude(x)));
}

Value mish(const Value& x) {
  return x * unary("tanh", soft_positive(x));
}

Value mish_gradient(const Value& g, const Value& x) {
  const auto tanh = unary("tanh", soft_positive(x));
  return g * (tanh + x * logistic(x) * tangent_slope(tanh));
}

Value leaky(const Value& x, const Value& slope) {
  return select(x > 0, x, x * slope);
}
Value leaky_gradient(const Value& g, const Value& x, const Value& slope) {
  return select(x > 0, g, g * slope);
}

Value elu(const Elements& e) {
  const auto x = e[0], alpha = e[1], scale = e[2], input_scale = e[3];
  const auto low = alpha * scale * unary("exponential_minus_one", x * input_scale);
  return select(x > 0, x * scale, low);
}

Value elu_gradient(const Elements& e) {
  const auto g = e[0], alpha = e[1], scale = e[2], input_scale = e[3], x = e[5];
  const auto low = e.call().flag(4) ? input_scale * (x + alpha * scale) : input_scale * (alpha * scale) * exponential(x * input_scale);
  return g * select(x <= 0, low, scale);
}

Value softplus(const Elements& e) {
  const auto x = e[0], scaled_x = x * e[1];
  return select(scaled_x > e[2], x, log_plus_one(exponential(scaled_x)) / e[1]);
}

Value softplus_gradient(const Elements& e) {
  const auto g = e[0], scaled_x = e[1] * e[2];
  return select(scaled_x > e[3], g, g * logistic(scaled_x));
}

/// Returns the gradient where x lies between the two limits or is NaN, and 0 elsewhere.
Value hard_tanh_gradient(const Elements& e) {
  const auto x = e[1];
  return select((x <= e[2]) | (x >= e[3]), 0, e[0]);
}

Value hard_shrunk(const Elements& e) {
  const auto x = e[e.call().arguments() - 2], limit = e[e.call().arguments() - 1];
  return select((x >= -limit) & (x <= limit), 0, e[0]);
}

Value soft_shrunk(const Value& x, const Value& limit) {
  const auto low = select(x < -limit, x + limit, x * 0);
  return select(x > limit, x - limit, low);
}

Value hard_logistic(const Value& x) {
  return smallest(largest(x + 3, 0), 6) / 6;
}

Value hard_swish_gradient(const Value& g, const Value& x) {
  const auto three = fixed(x, 3);
  const auto between = g * (x / three + 0.5);
  return select(x <= -3, 0, select(x < three, between, g));
}

void log_sigmoid(Call& call) {
  const auto x = call.wide_value(0);
  const auto type = call.result_type();
  const auto nothing = hlo::filled(0, {type, {0}});  // a buffer that only the CPU's kernel needs
  call.give({convert(-soft_positive(-x), type), nothing});
}

void log_sigmoid_gradient(Call& call) {
  call.give_rounded(call.wide_value(0) * logistic(-call.wide_value(1)));
}

std::pair<Value, Value> halves(const Value& x, int64_t d) {
  const auto half = x.size(d) / 2;
  return {slice(x, d, 0, half), slice(x, d, half, 2 * half)};
}

void gated(Call& call) {
  const auto x = call.wide_value(0);
  const auto [value, gate] = halves(x, at::maybe_wrap_dim(call.integer(1), x.rank()));
  call.give_rounded(value * logistic(gate));
}

void gated_gradient(Call& call) {
  const auto g = call.wide_value(0), x = call.wide_value(1);
  const auto d = at::maybe_wrap_dim(call.integer(2), x.rank());
  const auto [value, gate] = halves(x, d);
  const auto open = logistic(gate);
  const Value parts[] = {g * open, g * value * logistic_slope(open)};
  call.give_rounded(concatenate(parts, d));
}

void prelu_gradient(Call& call) {
  const Elements e(call, hlo::wide(call.result_type()));
  const auto g = e[0], x = e[1], zero = fixed(x, 0);
  const auto type = call.result_type();
  const Value results[] = {convert(leaky_gradient(g, x, e[2]), type), convert(select(x > zero, zero, g * x), type)};
  call.give(results);
}

}  // namespace

void register_activations() {
  add_kernels({
      elementwise("relu", [](const Value& x) { return largest(x, 0); }),
      elementwise("threshold", [](const Value& x, const Value& limit, const Value& otherwise) { return select(x <= limit, otherwise, x); }),
      elementwise("threshold_backward", [](const Value& g, const Value& x, const Value& limit) { return select(x <= limit, 0, g); }),
      elementwise("gelu", gelu),
      elementwise("gelu_backward", gelu_gradient),
      elementwise("silu", [](const Value& x) { return x * logistic(x); }),
      elementwise("silu_backward", silu_gradient),
      elementwise("mish", mish),
      elementwise("mish_backward", mish_gradient),
      elementwise("sigmoid_backward", [](const Value& g, const Value& y) { return g * logistic_slope(y); }),
      elementwise("tanh_backward", [](const Value& g, const Value& y) { return g * tangent_slope(y); }),
      elementwise("leaky_relu _prelu_kernel", leaky),
      elementwise("leaky_relu_backward", leaky_gradient),
      {"_prelu_kernel_backward", prelu_gradient},
      elementwise("elu", elu),
      elementwise("elu_backward", elu_gradient),
      elementwise("softplus", softplus),
      elementwise("softplus_backward", softplus_gradient),
      {"log_sigmoid_forward", log_sigmoid},
      {"log_sigmoid_backward", log_sigmoid_gradient},
      elementwise("hardtanh", [](const Value& x, const Value& low, const Value& high) { return smallest(largest(x, low), high); }),
      elementwise("hardtanh_backward", hard_tanh_gradient),
      elementwise("hardsigmoid", hard_logistic),
      elementwise("hardsigmoid_backward", [](const Value& g, const Value& x) { return select((x > -3) & (x < 3), g / 6, 0); }),
      elementwise("hardswish", [](const Value& x) { return x * hard_logistic(x); }),
      elementwise("hardswish_backward", hard_swish_gradient),
      elementwise("hardshrink hardshrink_backward softshrink_backward", hard_shrunk),
      elementwise("softshrink", soft_shrunk),
      {"glu", gated},
      {"glu_backward", gated_gradient},
  });
}

}  // namespace tessera::xla
