// Arithmetic, comparisons, logic, and functions of one number.
#include <cmath>
#include <limits>
#include <numbers>

#include "tessera/xla/device/elements.h"
#include "tessera/xla/device/views.h"

namespace tessera::xla {
namespace {

using hlo::both;
using hlo::compare;
using hlo::fixed;
using hlo::logarithm;
using hlo::minus;
using hlo::over;
using hlo::plus;
using hlo::select;
using hlo::times;

constexpr auto kInfinity = std::numeric_limits<double>::infinity();
constexpr auto kNan = std::numeric_limits<double>::quiet_NaN();

bool is_float(const Value& x) {
  return c10::isFloatingType(x.element());
}

/// Leaves whole numbers as they are.
Kernel rounding(const char* name, const char* operation) {
  return elementwise(name, [operation](const Elements& x) { return is_float(x[0]) ? hlo::unary(operation, x[0]) : x[0]; });
}

Value sign(const Value& x) {
  if (x.element() == at::kBool) return x;
  if (!c10::isSignedType(x.element())) return hlo::smallest(x, fixed(x, 1));
  const auto sign = hlo::unary("sign", x);
  return is_float(x) ? select(hlo::is_nan(x), fixed(x, 0), sign) : sign;
}

Value is_infinite(const Elements& x, double infinity) {
  return is_float(x[0]) ? compare("EQ", x[0], fixed(x[0], infinity)) : fixed(hlo::convert(x[0], at::kBool), 0);
}

Value scaled(const Elements& x, size_t value, size_t factor) {
  return x.call().is_one(factor) ? x[value] : times(x[value], x.as(factor, x.element()));
}

/// As Python does it, with the sign of `b`.
Value remainder(const Value& a, const Value& b) {
  const auto rest = hlo::binary("remainder", a, b);
  if (!is_float(a) && !c10::isSignedType(a.element())) return rest;
  const auto signs = compare("NE", hlo::is_negative(rest), hlo::is_negative(b));
  return select(both(signs, compare("NE", rest, fixed(rest, 0))), plus(rest, b), rest);
}

Value divided(const Elements& x) {
  if (!x.call().has(2)) return over(x[0], x[1]);
  if (x.call()[2].toStringView() == "floor") return floor_divided(x[0], x[1]);
  return is_float(x[0]) ? hlo::truncated(over(x[0], x[1])) : over(x[0], x[1]);
}

Value clamped(const Elements& x) {
  auto value = x[0];
  if (x.call().has(1)) value = hlo::largest(value, x[1]);
  if (x.call().has(2)) value = hlo::smallest(value, x[2]);
  return value;
}

/// A power, also of truth values.
Value power_of_any(const Elements& x) {
  if (x.element() != at::kBool) return hlo::binary("power", x[0], x[1]);
  return hlo::convert(hlo::binary("power", x.as(0, at::kLong), x.as(1, at::kLong)), at::kBool);
}

/// Interpolates from the nearer end, as libtorch does, so that both ends are exact.
Value between(const Value& a, const Value& b, const Value& weight) {
  const auto is_near = hlo::is_below(hlo::magnitude(weight), fixed(weight, 0.5));
  const auto from = select(is_near, a, b), share = select(is_near, weight, minus(weight, fixed(weight, 1)));
  return plus(from, times(share, minus(b, a)));
}

/// A power whose exponent is a number: some are products or roots, which are faster and give libtorch's values.
Value power(const Elements& e) {
  const auto x = e[0];
  const auto exponent = e.call().number(1);
  if (exponent == 2) return times(x, x);
  if (exponent == 3) return times(x, times(x, x));
  if (exponent == 0.5) return hlo::root(x);
  if (exponent == -0.5) return hlo::unary("rsqrt", x);
  if (exponent == -1 && is_float(x)) return over(fixed(x, 1), x);
  return power_of_any(e);
}

Value round_to_decimals(const Elements& x) {
  const auto decimals = x.call().integer(1);
  if (!is_float(x[0]) || decimals == 0) return is_float(x[0]) ? hlo::unary("round_nearest_even", x[0]) : x[0];
  const auto ten = fixed(x[0], std::pow(10.0, std::abs(static_cast<double>(decimals))));
  const auto up = decimals > 0;
  const auto whole = hlo::unary("round_nearest_even", up ? times(x[0], ten) : over(x[0], ten));
  return up ? over(whole, ten) : times(whole, ten);
}

/// Whether x is negative, where a zero has a sign, too.
Value has_sign(const Value& x) {
  if (is_float(x)) {
    const auto size = c10::elementSize(x.element());
    return hlo::is_negative(hlo::bitcast(x, size == 2 ? at::kShort : size == 4 ? at::kInt : at::kLong));
  }
  return c10::isSignedType(x.element()) ? hlo::is_negative(x) : fixed(hlo::convert(x, at::kBool), 0);
}

Value with_sign(const Value& a, const Value& b) {
  const auto size = hlo::magnitude(a);
  return select(has_sign(b), hlo::negated(size), size);
}

Value hypotenuse(const Value& a, const Value& b) {
  const auto x = hlo::magnitude(a), y = hlo::magnitude(b), large = hlo::largest(x, y), small = hlo::smallest(x, y);
  const auto ratio = over(small, large);
  const auto length = select(compare("EQ", small, fixed(a, 0)), large, times(large, hlo::root(plus(fixed(a, 1), times(ratio, ratio)))));
  const auto is_infinite = hlo::either(compare("EQ", x, fixed(a, kInfinity)), compare("EQ", y, fixed(a, kInfinity)));
  return select(is_infinite, fixed(a, kInfinity), length);  // also if the other is NaN
}

Value log_of_sum(const Value& a, const Value& b, double base) {
  const auto large = hlo::largest(a, b), difference = hlo::negated(hlo::magnitude(minus(a, b)));
  const auto sum =
      base == 2 ? over(hlo::log_plus_one(hlo::exponential(times(difference, fixed(a, std::numbers::ln2)))), fixed(a, std::numbers::ln2))
                : hlo::log_plus_one(hlo::exponential(difference));
  const auto same_infinities = both(compare("EQ", a, b), compare("EQ", hlo::magnitude(a), fixed(a, kInfinity)));
  return select(same_infinities, a, plus(large, sum));
}

/// x * of(y): 0 if x is 0, unless y is NaN.
Value zero_wins(const Value& x, const Value& y, const Value& of_y) {
  return select(hlo::is_nan(y), y, select(compare("EQ", x, fixed(x, 0)), fixed(x, 0), times(x, of_y)));
}

Value other_if_nan(const Value& a, const Value& b, const Value& chosen) {
  return is_float(a) ? select(hlo::is_nan(a), b, select(hlo::is_nan(b), a, chosen)) : chosen;
}

double largest_number(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return std::numeric_limits<double>::max();
    case at::kHalf:
      return std::numeric_limits<at::Half>::max();
    case at::kBFloat16:
      return std::numeric_limits<at::BFloat16>::max();
    default:
      return std::numeric_limits<float>::max();
  }
}

Value without_nan(const Elements& e) {
  const auto x = e[0];
  if (!is_float(x)) return x;
  const double largest = largest_number(e.call().tensor(0).scalar_type());
  const auto high = e.number(2, largest), low = e.number(3, -largest);
  const auto finite = select(compare("EQ", x, fixed(x, kInfinity)), high, select(compare("EQ", x, fixed(x, -kInfinity)), low, x));
  return select(hlo::is_nan(x), e.number(1), finite);
}

Value sine_over_x(const Value& x) {
  const auto angle = times(x, fixed(x, std::numbers::pi));
  return select(compare("EQ", x, fixed(x, 0)), fixed(x, 1), over(hlo::unary("sine", angle), angle));
}

Value log_odds(const Elements& e, size_t epsilon) {
  auto x = e[0];
  if (e.call().has(epsilon)) x = hlo::smallest(hlo::largest(x, e.number(epsilon)), e.full(1 - e.call().number(epsilon)));
  return logarithm(over(x, minus(fixed(x, 1), x)));
}

/// Takes whole numbers in the default dtype, because libtorch makes no tensor for the result that tells it.
void logit(Call& call) {
  const auto type = fractional(type_of_operands(call));
  call.give(hlo::convert(log_odds(Elements(call, hlo::wide(type)), 1), type));
}

/// Infinite at zeros, with the opposite sign.
Value digamma(const Value& x) {
  const auto infinite = select(has_sign(x), fixed(x, kInfinity), fixed(x, -kInfinity));
  return select(compare("EQ", x, fixed(x, 0)), infinite, hlo::unary("chlo.digamma", x));
}

Value log_odds_gradient(const Elements& e) {
  const auto g = e[0], x = e[1], one = fixed(x, 1);
  const auto gradient = over(g, times(x, minus(one, x)));
  if (!e.call().has(2)) return select(hlo::either(hlo::is_negative(x), hlo::is_above(x, one)), fixed(x, kNan), gradient);
  const auto low = e.number(2), high = e.full(1 - e.call().number(2));
  return select(hlo::either(hlo::is_below(x, low), hlo::is_above(x, high)), fixed(x, 0), gradient);
}

Value half_turn_below_zero(const Elements& e) {
  const auto x = e[0];
  if (!is_float(x)) throw NotLowered();  // the result has another type
  return select(hlo::is_nan(x), x, select(hlo::is_negative(x), fixed(x, std::numbers::pi), fixed(x, 0)));
}

Value entropy(const Value& x) {
  const auto negative = select(hlo::is_negative(x), fixed(x, -kInfinity), x);
  return select(hlo::is_above(x, fixed(x, 0)), hlo::negated(times(x, logarithm(x))), negative);
}

/// A shift by more bits than there are gives 0, or -1 if a negative number is shifted to the right.
Value bits_moved(const Elements& x, const char* direction) {
  const bool is_unsigned = !c10::isSignedType(x.element());
  return hlo::binary(direction != std::string_view("right") ? "shift_left"
                     : is_unsigned                          ? "shift_right_logical"
                                                            : "shift_right_arithmetic",
                     x[0], x[1]);
}

void where(Call& call) {
  const auto type = at::result_type(call.tensor(1), call.tensor(2));
  const Elements x(call, type);
  call.give(select(x.as(0, at::kBool), x[1], x[2]));
}

}  // namespace

void register_elementwise() {
  const Kernel kernels[] = {
      unary("exp", "exponential"),
      unary("expm1", "exponential_minus_one"),
      unary("log", "log"),
      unary("log1p", "log_plus_one"),
      unary("sqrt", "sqrt"),
      unary("rsqrt", "rsqrt"),
      unary("sin", "sine"),
      unary("cos", "cosine"),
      unary("tan", "tan"),
      unary("tanh", "tanh"),
      unary("sigmoid", "logistic"),
      unary("neg", "negate"),
      unary("bitwise_not", "not"),
      unary("erf", "chlo.erf"),
      unary("erfc", "chlo.erfc"),
      unary("erfinv", "chlo.erf_inv"),
      unary("lgamma", "chlo.lgamma"),
      elementwise("digamma", [](const Elements& x) { return digamma(x[0]); }),
      unary("asin", "chlo.asin"),
      unary("acos", "chlo.acos"),
      unary("atan", "chlo.atan"),
      unary("asinh", "chlo.asinh"),
      unary("acosh", "chlo.acosh"),
      unary("atanh", "chlo.atanh"),
      unary("sinh", "chlo.sinh"),
      unary("cosh", "chlo.cosh"),
      rounding("floor", "floor"),
      rounding("ceil", "ceil"),
      rounding("round", "round_nearest_even"),
      elementwise("round.decimals", round_to_decimals),
      elementwise("trunc", [](const Elements& x) { return is_float(x[0]) ? hlo::truncated(x[0]) : x[0]; }),
      elementwise("frac", [](const Elements& x) { return minus(x[0], hlo::truncated(x[0])); }),
      elementwise("abs", [](const Elements& x) { return hlo::magnitude(x[0]); }),
      elementwise("sign", [](const Elements& x) { return sign(x[0]); }),
      elementwise("sgn", [](const Elements& x) { return sign(x[0]); }),
      elementwise("conj_physical", [](const Elements& x) { return x[0]; }),
      elementwise("reciprocal", [](const Elements& x) { return over(fixed(x[0], 1), x[0]); }),
      elementwise("exp2", [](const Elements& x) { return hlo::binary("power", fixed(x[0], 2), x[0]); }),
      elementwise("log2", [](const Elements& x) { return over(logarithm(x[0]), fixed(x[0], std::numbers::ln2)); }),
      elementwise("log10", [](const Elements& x) { return over(logarithm(x[0]), fixed(x[0], std::numbers::ln10)); }),
      elementwise("sinc", [](const Elements& x) { return sine_over_x(x[0]); }),
      elementwise("nan_to_num", without_nan),
      {"logit", logit},
      elementwise("logit_backward", log_odds_gradient),
      elementwise("angle", half_turn_below_zero),
      elementwise("special_entr", [](const Elements& x) { return entropy(x[0]); }),
      elementwise("logical_not", [](const Elements& x) { return hlo::opposite(x.as(0, at::kBool)); }),
      comparison("signbit", [](const Elements& x) { return has_sign(x[0]); }),
      comparison("isnan", [](const Elements& x) { return hlo::is_nan(x[0]); }),
      comparison("isneginf", [](const Elements& x) { return is_infinite(x, -kInfinity); }),
      comparison("isposinf", [](const Elements& x) { return is_infinite(x, kInfinity); }),

      elementwise("add.Tensor", [](const Elements& x) { return plus(x[0], scaled(x, 1, 2)); }),
      elementwise("sub.Tensor", [](const Elements& x) { return minus(x[0], scaled(x, 1, 2)); }),
      elementwise("rsub.Tensor", [](const Elements& x) { return minus(x[1], scaled(x, 0, 2)); }),
      binary("mul.Tensor", "multiply"),
      binary("div.Tensor", "divide"),
      binary("fmod.Tensor", "remainder"),
      binary("maximum", "maximum"),
      binary("minimum", "minimum"),
      elementwise("pow.Tensor_Tensor", power_of_any),
      elementwise("pow.Scalar", power_of_any),
      binary("atan2", "atan2"),
      binary("bitwise_and.Tensor", "and"),
      binary("bitwise_or.Tensor", "or"),
      binary("bitwise_xor.Tensor", "xor"),
      binary("nextafter", "chlo.next_after"),
      elementwise("div.Tensor_mode", divided),
      elementwise("floor_divide", [](const Elements& x) { return floor_divided(x[0], x[1]); }),
      elementwise("remainder.Tensor", [](const Elements& x) { return remainder(x[0], x[1]); }),
      elementwise("remainder.Scalar_Tensor", [](const Elements& x) { return remainder(x[0], x[1]); }),
      elementwise("pow.Tensor_Scalar", power),
      elementwise("copysign.Tensor", [](const Elements& x) { return with_sign(x[0], x[1]); }),
      elementwise("hypot", [](const Elements& x) { return hypotenuse(x[0], x[1]); }),
      elementwise("logaddexp", [](const Elements& x) { return log_of_sum(x[0], x[1], std::numbers::e); }),
      elementwise("logaddexp2", [](const Elements& x) { return log_of_sum(x[0], x[1], 2); }),
      elementwise("xlogy.Tensor", [](const Elements& x) { return zero_wins(x[0], x[1], logarithm(x[1])); }),
      elementwise("special_xlog1py", [](const Elements& x) { return zero_wins(x[0], x[1], hlo::log_plus_one(x[1])); }),
      elementwise("fmax", [](const Elements& x) { return other_if_nan(x[0], x[1], hlo::largest(x[0], x[1])); }),
      elementwise("fmin", [](const Elements& x) { return other_if_nan(x[0], x[1], hlo::smallest(x[0], x[1])); }),
      elementwise("heaviside",
                  [](const Elements& x) {
                    const auto step = hlo::convert(hlo::is_above(x[0], fixed(x[0], 0)), x.element());
                    return select(compare("EQ", x[0], fixed(x[0], 0)), x[1], step);
                  }),
      elementwise("bitwise_left_shift.Tensor", [](const Elements& x) { return bits_moved(x, "left"); }),
      elementwise("bitwise_right_shift.Tensor", [](const Elements& x) { return bits_moved(x, "right"); }),
      elementwise("__lshift__.Tensor", [](const Elements& x) { return bits_moved(x, "left"); }),
      elementwise("__rshift__.Tensor", [](const Elements& x) { return bits_moved(x, "right"); }),
      elementwise("__lshift__.Scalar", [](const Elements& x) { return bits_moved(x, "left"); }),
      elementwise("__rshift__.Scalar", [](const Elements& x) { return bits_moved(x, "right"); }),
      elementwise("__ilshift__.Tensor", [](const Elements& x) { return bits_moved(x, "left"); }),
      elementwise("__irshift__.Tensor", [](const Elements& x) { return bits_moved(x, "right"); }),
      elementwise("__ilshift__.Scalar", [](const Elements& x) { return bits_moved(x, "left"); }),
      elementwise("__irshift__.Scalar", [](const Elements& x) { return bits_moved(x, "right"); }),
      elementwise("logical_and", [](const Elements& x) { return both(x.as(0, at::kBool), x.as(1, at::kBool)); }),
      elementwise("logical_or", [](const Elements& x) { return hlo::either(x.as(0, at::kBool), x.as(1, at::kBool)); }),
      elementwise("logical_xor", [](const Elements& x) { return hlo::binary("xor", x.as(0, at::kBool), x.as(1, at::kBool)); }),
      comparison("eq.Tensor", "EQ"),
      comparison("ne.Tensor", "NE"),
      comparison("lt.Tensor", "LT"),
      comparison("le.Tensor", "LE"),
      comparison("gt.Tensor", "GT"),
      comparison("ge.Tensor", "GE"),
      comparison("eq.Scalar", "EQ"),
      comparison("ne.Scalar", "NE"),
      comparison("lt.Scalar", "LT"),
      comparison("le.Scalar", "LE"),
      comparison("gt.Scalar", "GT"),
      comparison("ge.Scalar", "GE"),

      elementwise("addcmul", [](const Elements& x) { return plus(x[0], times(times(x[1], x[2]), x[3])); }),
      elementwise("addcdiv", [](const Elements& x) { return plus(x[0], times(over(x[1], x[2]), x[3])); }),
      elementwise("lerp.Scalar", [](const Elements& x) { return between(x[0], x[1], x[2]); }),
      elementwise("lerp.Tensor", [](const Elements& x) { return between(x[0], x[1], x[2]); }),
      elementwise("clamp", clamped),
      elementwise("clamp.Tensor", clamped),
      elementwise("clamp_min", [](const Elements& x) { return hlo::largest(x[0], x[1]); }),
      elementwise("clamp_max", [](const Elements& x) { return hlo::smallest(x[0], x[1]); }),
      elementwise("clamp_min.Tensor", [](const Elements& x) { return hlo::largest(x[0], x[1]); }),
      elementwise("clamp_max.Tensor", [](const Elements& x) { return hlo::smallest(x[0], x[1]); }),
      {"where.self", where},
      elementwise("masked_fill_.Scalar", [](const Elements& x) { return select(x.as(1, at::kBool), x[2], x[0]); }),
      elementwise("masked_fill_.Tensor", [](const Elements& x) { return select(x.as(1, at::kBool), x[2], x[0]); }),
      elementwise("fill_.Scalar", [](const Elements& x) { return x[1]; }),
      elementwise("fill_.Tensor", [](const Elements& x) { return x[1]; }),
      elementwise("zero_", [](const Elements& x) { return hlo::broadcast(hlo::constant(0.0, x.element()), x.sizes(), {}); }),
  };
  add_kernels(kernels);
}

}  // namespace tessera::xla
