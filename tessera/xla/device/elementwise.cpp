// Operators that compute each element of the result from the elements at the same place.
#include <ATen/ExpandUtils.h>
#include <ATen/native/TypeProperties.h>

#include <cmath>
#include <limits>
#include <numbers>

#include "tessera/base/error.h"
#include "tessera/xla/device/kernels.h"
#include "tessera/xla/device/views.h"
#include "tessera/xla/graph/arithmetic.h"

namespace tessera::xla {
namespace {

using hlo::plus;
using hlo::minus;
using hlo::times;
using hlo::over;
using hlo::like;
using hlo::wide;

using at::ScalarType;

constexpr auto kInfinity = std::numeric_limits<double>::infinity();

/// The arguments of one call, all of one type and one shape.
class Elements {
 public:
  /// `element` is the type in which it is computed.
  Elements(Call& call, ScalarType element) : call_(call), element_(element) {
    for (size_t i = 0; i < call.arguments(); i++) {
      if (call[i].isTensor() && call.tensor(i).defined()) sizes_ = at::infer_size(sizes_, call.tensor(i).sizes());
    }
  }

  Value operator[](size_t i) const { return expanded(call_.value(i, element_)); }
  Value as(size_t i, ScalarType element) const { return expanded(call_.value(i, element)); }
  Value full(double number) const { return hlo::full(number, {element_, sizes_}); }
  Value number(size_t i, double otherwise = 0) const { return full(call_.has(i) ? call_.number(i) : otherwise); }
  const Call& call() const { return call_; }
  ScalarType element() const { return element_; }

 private:
  Value expanded(const Value& value) const { return hlo::expand(value, sizes_); }

  Call& call_;
  ScalarType element_;
  Sizes sizes_;
};

Value logistic(const Value& x) { return hlo::unary("logistic", x); }
Value is_negative(const Value& x) { return hlo::compare("LT", x, like(x, 0)); }

/// Computed in the type of the result.
template <Value (*compute)(const Elements&)>
void in_result_type(Call& call) {
  const Elements elements(call, wide(call.result_type()));
  call.give(hlo::convert(compute(elements), call.result_type()));
}

/// Computed in the type that all operands can have, whatever the result is.
template <Value (*compute)(const Elements&)>
void in_common_type(Call& call) {
  at::native::ResultTypeState state = {};
  for (size_t i = 0; i < call.arguments(); i++) {
    if (call[i].isTensor() && call.tensor(i).defined()) state = at::native::update_result_type_state(call.tensor(i), state);
    if (call[i].isScalar()) state = at::native::update_result_type_state(call[i].toScalar(), state);
  }
  const auto common = at::native::result_type(state);
  call.give(hlo::convert(compute(Elements(call, common)), call.out() ? call.result_type() : at::kBool));
}

#define UNARY(name, operation) \
  { name, &in_result_type<+[](const Elements& x) { return hlo::unary(operation, x[0]); }> }
#define BINARY(name, operation) \
  { name, &in_result_type<+[](const Elements& x) { return hlo::binary(operation, x[0], x[1]); }> }
#define COMPARISON(name, direction) \
  { name, &in_common_type<+[](const Elements& x) { return hlo::compare(direction, x[0], x[1]); }> }
#define COMPUTE(name, expression) \
  { name, &in_result_type<+[](const Elements& x) -> Value { return expression; }> }

Value scaled(const Elements& x, size_t value, size_t factor) {
  return x.call().number(factor) == 1 ? x[value] : times(x[value], x.number(factor));
}

Value floor_divided(const Value& a, const Value& b) {
  if (c10::isFloatingType(a.element())) return hlo::unary("floor", over(a, b));
  const auto quotient = over(a, b);
  const auto inexact = hlo::compare("NE", times(quotient, b), a);
  const auto signs = hlo::compare("NE", is_negative(a), is_negative(b));
  return hlo::select(hlo::binary("and", inexact, signs), minus(quotient, like(a, 1)), quotient);
}

Value remainder(const Value& a, const Value& b) {
  const auto rest = hlo::binary("remainder", a, b);
  const auto signs = hlo::compare("NE", is_negative(rest), is_negative(b));
  return hlo::select(hlo::binary("and", signs, hlo::compare("NE", rest, like(rest, 0))), plus(rest, b), rest);
}

Value divided(const Elements& x) {
  if (!x.call().has(2)) return over(x[0], x[1]);
  const auto mode = x.call()[2].toStringView();
  if (mode == "floor") return floor_divided(x[0], x[1]);
  const auto quotient = over(x[0], x[1]);
  if (!c10::isFloatingType(quotient.element())) return quotient;
  return hlo::select(is_negative(quotient), hlo::unary("ceil", quotient), hlo::unary("floor", quotient));
}

Value clamped(const Elements& x) {
  auto value = x[0];
  if (x.call().has(1)) value = hlo::binary("maximum", value, x[1]);
  if (x.call().has(2)) value = hlo::binary("minimum", value, x[2]);
  return value;
}

bool is_tanh_form(const Elements& x, size_t i) { return x.call()[i].toStringView() == "tanh"; }

Value gelu(const Elements& e) {
  const auto x = e[0];
  if (is_tanh_form(e, 1)) {
    const auto inner = times(like(x, std::numbers::sqrt2 * std::numbers::inv_sqrtpi), plus(x, times(like(x, 0.044715), times(x, times(x, x)))));
    return times(times(like(x, 0.5), x), plus(like(x, 1), hlo::unary("tanh", inner)));
  }
  return times(times(like(x, 0.5), x), plus(like(x, 1), hlo::unary("chlo.erf", times(x, like(x, 1 / std::numbers::sqrt2)))));
}

Value gelu_gradient(const Elements& e) {
  const auto g = e[0], x = e[1], one = like(x, 1), half = like(x, 0.5);
  if (is_tanh_form(e, 2)) {
    const double beta = std::numbers::sqrt2 * std::numbers::inv_sqrtpi, kappa = 0.044715;
    const auto square = times(x, x);
    const auto tanh = hlo::unary("tanh", times(like(x, beta), plus(x, times(like(x, kappa), times(x, square)))));
    const auto slope = times(like(x, beta), plus(one, times(like(x, 3 * kappa), square)));
    const auto right = times(times(times(half, x), minus(one, times(tanh, tanh))), slope);
    return times(g, plus(times(half, plus(one, tanh)), right));
  }
  const auto cdf = times(half, plus(one, hlo::unary("chlo.erf", times(x, like(x, 1 / std::numbers::sqrt2)))));
  const auto pdf = times(like(x, std::numbers::inv_sqrtpi / std::numbers::sqrt2), hlo::unary("exponential", times(like(x, -0.5), times(x, x))));
  return times(g, plus(cdf, times(x, pdf)));
}

Value silu_gradient(const Elements& e) {
  const auto g = e[0], x = e[1], s = logistic(x), one = like(x, 1);
  return times(g, times(s, plus(one, times(x, minus(one, s)))));
}

Value threshold_gradient(const Elements& e) { return hlo::select(hlo::compare("LE", e[1], e.number(2)), e.full(0), e[0]); }

Value leaky(const Elements& e) { return hlo::select(hlo::compare("GT", e[0], e.full(0)), e[0], times(e[0], e.number(1))); }

Value elu(const Elements& e) {
  const auto x = e[0];
  const double alpha = e.call().number(1), scale = e.call().number(2), input_scale = e.call().number(3);
  const auto low = times(like(x, alpha * scale), hlo::unary("exponential_minus_one", times(x, like(x, input_scale))));
  return hlo::select(hlo::compare("GT", x, like(x, 0)), times(x, like(x, scale)), low);
}

Value softplus(const Elements& e) {
  const auto x = e[0], scaled_x = times(x, e.number(1));
  return hlo::select(hlo::compare("GT", scaled_x, e.number(2)), x, over(hlo::unary("log_plus_one", hlo::unary("exponential", scaled_x)), e.number(1)));
}

void where(Call& call) {
  const auto type = at::result_type(call.tensor(1), call.tensor(2));
  const Elements x(call, type);
  call.give(hlo::select(x.as(0, at::kBool), x[1], x[2]));
}

const Kernel kElementwise[] = {
    UNARY("abs.out", "abs"),
    UNARY("neg.out", "negate"),
    UNARY("exp.out", "exponential"),
    UNARY("expm1.out", "exponential_minus_one"),
    UNARY("log.out", "log"),
    UNARY("log1p.out", "log_plus_one"),
    UNARY("sqrt.out", "sqrt"),
    UNARY("rsqrt.out", "rsqrt"),
    UNARY("sin.out", "sine"),
    UNARY("cos.out", "cosine"),
    UNARY("tan.out", "tan"),
    UNARY("tanh.out", "tanh"),
    UNARY("sigmoid.out", "logistic"),
    UNARY("floor.out", "floor"),
    UNARY("ceil.out", "ceil"),
    UNARY("round.out", "round_nearest_even"),
    UNARY("sign.out", "sign"),
    UNARY("bitwise_not.out", "not"),
    UNARY("erf.out", "chlo.erf"),
    UNARY("erfc.out", "chlo.erfc"),
    UNARY("erfinv.out", "chlo.erf_inv"),
    UNARY("lgamma.out", "chlo.lgamma"),
    UNARY("digamma.out", "chlo.digamma"),
    UNARY("asin.out", "chlo.asin"),
    UNARY("acos.out", "chlo.acos"),
    UNARY("atan.out", "chlo.atan"),
    UNARY("asinh.out", "chlo.asinh"),
    UNARY("acosh.out", "chlo.acosh"),
    UNARY("atanh.out", "chlo.atanh"),
    UNARY("sinh.out", "chlo.sinh"),
    UNARY("cosh.out", "chlo.cosh"),
    COMPUTE("reciprocal.out", over(x.full(1), x[0])),
    COMPUTE("exp2.out", hlo::unary("exponential", times(x[0], x.full(std::numbers::ln2)))),
    COMPUTE("log2.out", over(hlo::unary("log", x[0]), x.full(std::numbers::ln2))),
    COMPUTE("log10.out", over(hlo::unary("log", x[0]), x.full(std::numbers::ln10))),
    COMPUTE("trunc.out", hlo::select(is_negative(x[0]), hlo::unary("ceil", x[0]), hlo::unary("floor", x[0]))),
    COMPUTE("frac.out", minus(x[0], hlo::select(is_negative(x[0]), hlo::unary("ceil", x[0]), hlo::unary("floor", x[0])))),
    COMPUTE("logical_not.out", hlo::unary("not", x.as(0, at::kBool))),
{"isnan", &in_common_type<+[](const Elements& x) { return hlo::compare("NE", x[0], x[0]); }>},
    {"isneginf.out", &in_common_type<+[](const Elements& x) { return hlo::compare("EQ", x[0], x.full(-kInfinity)); }>},
    {"isposinf.out", &in_common_type<+[](const Elements& x) { return hlo::compare("EQ", x[0], x.full(kInfinity)); }>},

    COMPUTE("add.out", plus(x[0], scaled(x, 1, 2))),
    COMPUTE("sub.out", minus(x[0], scaled(x, 1, 2))),
    BINARY("mul.out", "multiply"),
    BINARY("div.out", "divide"),
    COMPUTE("div.out_mode", divided(x)),
    COMPUTE("floor_divide.out", floor_divided(x[0], x[1])),
    COMPUTE("remainder.Tensor_out", remainder(x[0], x[1])),
    BINARY("fmod.Tensor_out", "remainder"),
    BINARY("maximum.out", "maximum"),
    BINARY("minimum.out", "minimum"),
    BINARY("pow.Tensor_Tensor_out", "power"),
    COMPUTE("pow.Tensor_Scalar_out", x.call().number(1) == 2 ? times(x[0], x[0]) : hlo::binary("power", x[0], x[1])),
    BINARY("pow.Scalar_out", "power"),
    BINARY("atan2.out", "atan2"),
    BINARY("bitwise_and.Tensor_out", "and"),
    BINARY("bitwise_or.Tensor_out", "or"),
    BINARY("bitwise_xor.Tensor_out", "xor"),
    COMPUTE("logical_and.out", hlo::binary("and", x.as(0, at::kBool), x.as(1, at::kBool))),
    COMPUTE("logical_or.out", hlo::binary("or", x.as(0, at::kBool), x.as(1, at::kBool))),
    COMPUTE("logical_xor.out", hlo::binary("xor", x.as(0, at::kBool), x.as(1, at::kBool))),
    COMPARISON("eq.Tensor_out", "EQ"),
    COMPARISON("ne.Tensor_out", "NE"),
    COMPARISON("lt.Tensor_out", "LT"),
    COMPARISON("le.Tensor_out", "LE"),
    COMPARISON("gt.Tensor_out", "GT"),
    COMPARISON("ge.Tensor_out", "GE"),
    COMPARISON("eq.Scalar_out", "EQ"),
    COMPARISON("ne.Scalar_out", "NE"),
    COMPARISON("lt.Scalar_out", "LT"),
    COMPARISON("le.Scalar_out", "LE"),
    COMPARISON("gt.Scalar_out", "GT"),
    COMPARISON("ge.Scalar_out", "GE"),

    COMPUTE("addcmul.out", plus(x[0], times(times(x[1], x[2]), x.number(3)))),
    COMPUTE("addcdiv.out", plus(x[0], times(over(x[1], x[2]), x.number(3)))),
    COMPUTE("lerp.Scalar_out", plus(x[0], times(x.number(2), minus(x[1], x[0])))),
    COMPUTE("lerp.Tensor_out", plus(x[0], times(x[2], minus(x[1], x[0])))),
    COMPUTE("clamp.out", clamped(x)),
    COMPUTE("clamp.Tensor_out", clamped(x)),
    COMPUTE("clamp_min.out", hlo::binary("maximum", x[0], x[1])),
    COMPUTE("clamp_max.out", hlo::binary("minimum", x[0], x[1])),
    {"where.self", where},
    COMPUTE("where.self_out", hlo::select(x.as(0, at::kBool), x[1], x[2])),
    COMPUTE("masked_fill_.Scalar", hlo::select(x.as(1, at::kBool), x.number(2), x[0])),
    COMPUTE("masked_fill_.Tensor", hlo::select(x.as(1, at::kBool), x[2], x[0])),
    COMPUTE("fill_.Scalar", x.number(1)),
    COMPUTE("fill_.Tensor", x[1]),
    COMPUTE("zero_", x.full(0)),

    COMPUTE("relu", hlo::binary("maximum", x[0], x.full(0))),
    COMPUTE("relu_", hlo::binary("maximum", x[0], x.full(0))),
    COMPUTE("threshold.out", hlo::select(hlo::compare("GT", x[0], x.number(1)), x[0], x.number(2))),
    COMPUTE("threshold_backward.grad_input", threshold_gradient(x)),
    COMPUTE("gelu.out", gelu(x)),
    COMPUTE("gelu_backward.grad_input", gelu_gradient(x)),
    COMPUTE("silu.out", times(x[0], logistic(x[0]))),
    COMPUTE("silu_backward.grad_input", silu_gradient(x)),
    COMPUTE("sigmoid_backward.grad_input", times(x[0], times(x[1], minus(x.full(1), x[1])))),
    COMPUTE("tanh_backward.grad_input", times(x[0], minus(x.full(1), times(x[1], x[1])))),
    COMPUTE("leaky_relu.out", leaky(x)),
    COMPUTE("leaky_relu_backward.grad_input", hlo::select(hlo::compare("GT", x[1], x.full(0)), x[0], times(x[0], x.number(2)))),
    COMPUTE("elu.out", elu(x)),
    COMPUTE("softplus.out", softplus(x)),
};

#undef UNARY
#undef BINARY
#undef COMPARISON
#undef COMPUTE

}  // namespace

void register_elementwise() { add_kernels(kElementwise); }

}  // namespace tessera::xla
