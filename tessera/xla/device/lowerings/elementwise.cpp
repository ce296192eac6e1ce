// Arithmetic, comparisons, logic, and functions of one number.
#include <cmath>
#include <limits>
#include <numbers>

#include "tessera/xla/device/elements.h"

namespace tessera::xla {
namespace {

constexpr auto kInfinity = std::numeric_limits<double>::infinity();
constexpr auto kNan = std::numeric_limits<double>::quiet_NaN();

bool is_float(const Value& x) {
  return c10::isFloatingType(x.element());
}

/// Makes a kernel that rounds. It leaves whole numbers as they are.
Kernel rounding(const char* name, const char* operation) {
  return elementwise(name, [operation](const Value& x) { return is_float(x) ? unary(operation, x) : x; });
}

Value sign(const Value& x) {
  if (x.element() == at::kBool) return x;
  if (!c10::isSignedType(x.element())) return smallest(x, 1);
  const auto sign = unary("sign", x);
  return is_float(x) ? select(is_nan(x), 0, sign) : sign;
}

Value is_infinite(const Value& x, double infinity) {
  return is_float(x) ? compare("EQ", x, infinity) : hlo::filled(0, {at::kBool, x.sizes()});
}

Value scaled(const Elements& x, size_t value, size_t factor) {
  return x.call().is_one(factor) ? x[value] : x[value] * x.as(factor, x.element());
}

/// The remainder as Python defines it, with the sign of `b`.
Value remainder(const Value& a, const Value& b) {
  const auto rest = binary("remainder", a, b);
  if (!is_float(a) && !c10::isSignedType(a.element())) return rest;
  const auto signs = compare("NE", rest < 0, b < 0);
  return select(signs & compare("NE", rest, 0), rest + b, rest);
}

Value divided(const Elements& x) {
  if (!x.call().has(2)) return x[0] / x[1];
  if (x.call()[2].toStringView() == "floor") return floor_divided(x[0], x[1]);
  return is_float(x[0]) ? truncated(x[0] / x[1]) : x[0] / x[1];
}

Value clamped(const Elements& x) {
  auto value = x[0];
  if (x.call().has(1)) value = hlo::largest(value, x[1]);
  if (x.call().has(2)) value = smallest(value, x[2]);
  return value;
}

/// Computes a power, also of bools.
Value power_of_any(const Elements& x) {
  if (x.element() != at::kBool) return binary("power", x[0], x[1]);
  return convert(binary("power", x.as(0, at::kLong), x.as(1, at::kLong)), at::kBool);
}

/// Interpolates from the nearer end, as libtorch does, so that both ends are exact.
Value interpolated(const Value& a, const Value& b, const Value& weight) {
  const auto is_near = magnitude(weight) < 0.5;
  const auto from = select(is_near, a, b), share = select(is_near, weight, weight - 1);
  return from + share * (b - a);
}

/// Computes a power whose exponent is a number. Some exponents become products or roots, which are faster and give libtorch's values.
Value power(const Elements& e) {
  const auto x = e[0];
  const auto exponent = e.call().number(1);
  if (exponent == 2) return x * x;
  if (exponent == 3) return x * (x * x);
  if (exponent == 0.5) return root(x);
  if (exponent == -0.5) return unary("rsqrt", x);
  if (exponent == -1 && is_float(x)) return 1 / x;
  return power_of_any(e);
}

Value round_to_decimals(const Elements& x) {
  const auto decimals = x.call().integer(1);
  if (!is_float(x[0]) || decimals == 0) return is_float(x[0]) ? unary("round_nearest_even", x[0]) : x[0];
  const auto ten = fixed(x[0], std::pow(10.0, std::abs(static_cast<double>(decimals))));
  const auto up = decimals > 0;
  const auto whole = unary("round_nearest_even", up ? x[0] * ten : x[0] / ten);
  return up ? whole / ten : whole * ten;
}

/// Whether x has the negative sign; a zero can have it, too.
Value has_sign(const Value& x) {
  if (is_float(x)) {
    const auto size = c10::elementSize(x.element());
    return bitcast(x, size == 2 ? at::kShort : size == 4 ? at::kInt : at::kLong) < 0;
  }
  return c10::isSignedType(x.element()) ? x < 0 : hlo::filled(0, {at::kBool, x.sizes()});
}

Value with_sign(const Value& a, const Value& b) {
  const auto size = magnitude(a);
  return select(has_sign(b), -size, size);
}

Value hypotenuse(const Value& a, const Value& b) {
  const auto x = magnitude(a), y = magnitude(b), large = hlo::largest(x, y), small = smallest(x, y);
  const auto ratio = small / large;
  const auto length = select(compare("EQ", small, 0), large, large * root(1 + ratio * ratio));
  const auto is_infinite = compare("EQ", x, kInfinity) | compare("EQ", y, kInfinity);
  return select(is_infinite, kInfinity, length);  // also if the other operand is NaN
}

Value log_of_sum(const Value& a, const Value& b, double base) {
  const auto large = hlo::largest(a, b), difference = -magnitude(a - b);
  const auto sum =
      base == 2 ? log_plus_one(exponential(difference * std::numbers::ln2)) / std::numbers::ln2 : log_plus_one(exponential(difference));
  const auto same_infinities = compare("EQ", a, b) & compare("EQ", magnitude(a), kInfinity);
  return select(same_infinities, a, large + sum);
}

/// Returns x * of_y, but 0 if x is 0, and NaN if y is NaN. `of_y` is a function of y.
Value zero_wins(const Value& x, const Value& y, const Value& of_y) {
  return select(is_nan(y), y, select(compare("EQ", x, 0), 0, x * of_y));
}

Value other_if_nan(const Value& a, const Value& b, const Value& chosen) {
  return is_float(a) ? select(is_nan(a), b, select(is_nan(b), a, chosen)) : chosen;
}

double largest_number(at::ScalarType type) {
  return of_floating_type(type, [](auto number) { return static_cast<double>(std::numeric_limits<decltype(number)>::max()); });
}

Value without_nan(const Elements& e) {
  const auto x = e[0];
  if (!is_float(x)) return x;
  const double largest = largest_number(e.call().tensor(0).scalar_type());
  const auto high = e.number(2, largest), low = e.number(3, -largest);
  const auto finite = select(compare("EQ", x, kInfinity), high, select(compare("EQ", x, -kInfinity), low, x));
  return select(is_nan(x), e.number(1), finite);
}

Value sine_over_x(const Value& x) {
  const auto angle = x * std::numbers::pi;
  return select(compare("EQ", x, 0), 1, unary("sine", angle) / angle);
}

Value log_odds(const Elements& e, size_t epsilon) {
  auto x = e[0];
  if (e.call().has(epsilon)) x = smallest(hlo::largest(x, e[epsilon]), e.full(1 - e.call().number(epsilon)));
  return logarithm(x / (1 - x));
}

/// Converts whole numbers to the default dtype here: libtorch passes no tensor for the result, whose dtype would say the type.
void logit(Call& call) {
  const auto type = fractional(type_of_operands(call));
  call.give(convert(log_odds(Elements(call, hlo::wide(type)), 1), type));
}

/// The digamma function. It is infinite at 0 and -0, with the opposite sign.
Value digamma(const Value& x) {
  const auto infinite = select(has_sign(x), fixed(x, kInfinity), -kInfinity);
  return select(compare("EQ", x, 0), infinite, unary("chlo.digamma", x));
}

Value log_odds_gradient(const Elements& e) {
  const auto g = e[0], x = e[1], one = fixed(x, 1);
  const auto gradient = g / (x * (one - x));
  if (!e.call().has(2)) return select((x < 0) | (x > one), kNan, gradient);
  const auto low = e[2], high = e.full(1 - e.call().number(2));
  return select((x < low) | (x > high), 0, gradient);
}

Value half_turn_below_zero(const Elements& e) {
  const auto x = e[0];
  if (!is_float(x)) throw NotLowered();  // the result for whole numbers has another type
  return select(is_nan(x), x, select(x < 0, fixed(x, std::numbers::pi), 0));
}

Value entropy(const Value& x) {
  const auto negative = select(x < 0, -kInfinity, x);
  return select(x > 0, -(x * logarithm(x)), negative);
}

/// Shifts bits to the right. A shift by more bits than the type has gives 0, or -1 for a negative number.
Value moved_right(const Value& bits, const Value& by) {
  return binary(c10::isSignedType(bits.element()) ? "shift_right_arithmetic" : "shift_right_logical", bits, by);
}

void where(Call& call) {
  const auto type = at::result_type(call.tensor(1), call.tensor(2));
  const Elements x(call, type);
  call.give(select(x.as(0, at::kBool), x[1], x[2]));
}

}  // namespace

void register_elementwise() {
  add_kernels({
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
      elementwise("digamma", digamma),
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
      elementwise("trunc", [](const Value& x) { return is_float(x) ? truncated(x) : x; }),
      elementwise("frac", [](const Value& x) { return x - truncated(x); }),
      elementwise("abs", hlo::magnitude),
      elementwise("sign sgn", sign),
      elementwise("conj_physical", [](const Value& x) { return x; }),
      elementwise("reciprocal", [](const Value& x) { return 1 / x; }),
      elementwise("exp2", [](const Value& x) { return binary("power", 2, x); }),
      elementwise("log2", [](const Value& x) { return logarithm(x) / std::numbers::ln2; }),
      elementwise("log10", [](const Value& x) { return logarithm(x) / std::numbers::ln10; }),
      elementwise("sinc", sine_over_x),
      elementwise("nan_to_num", without_nan),
      {"logit", logit},
      elementwise("logit_backward", log_odds_gradient),
      elementwise("angle", half_turn_below_zero),
      elementwise("special_entr", entropy),
      elementwise("logical_not", [](const Elements& x) { return opposite(x.as(0, at::kBool)); }),
      comparison("signbit", has_sign),
      comparison("isnan", hlo::is_nan),
      comparison("isneginf", [](const Value& x) { return is_infinite(x, -kInfinity); }),
      comparison("isposinf", [](const Value& x) { return is_infinite(x, kInfinity); }),

      elementwise("add.Tensor", [](const Elements& x) { return x[0] + scaled(x, 1, 2); }),
      elementwise("sub.Tensor", [](const Elements& x) { return x[0] - scaled(x, 1, 2); }),
      elementwise("rsub.Tensor", [](const Elements& x) { return x[1] - scaled(x, 0, 2); }),
      binary("mul.Tensor", "multiply"),
      binary("div.Tensor", "divide"),
      binary("fmod.Tensor", "remainder"),
      binary("maximum clamp_min clamp_min.Tensor", "maximum"),
      binary("minimum clamp_max clamp_max.Tensor", "minimum"),
      elementwise("pow.Tensor_Tensor pow.Scalar", power_of_any),
      binary("atan2", "atan2"),
      binary("bitwise_and.Tensor", "and"),
      binary("bitwise_or.Tensor", "or"),
      binary("bitwise_xor.Tensor", "xor"),
      binary("nextafter", "chlo.next_after"),
      elementwise("div.Tensor_mode", divided),
      elementwise("floor_divide", floor_divided),
      elementwise("remainder.Tensor remainder.Scalar_Tensor", remainder),
      elementwise("pow.Tensor_Scalar", power),
      elementwise("copysign.Tensor", with_sign),
      elementwise("hypot", hypotenuse),
      elementwise("logaddexp", [](const Value& a, const Value& b) { return log_of_sum(a, b, std::numbers::e); }),
      elementwise("logaddexp2", [](const Value& a, const Value& b) { return log_of_sum(a, b, 2); }),
      elementwise("xlogy.Tensor", [](const Value& x, const Value& y) { return zero_wins(x, y, logarithm(y)); }),
      elementwise("special_xlog1py", [](const Value& x, const Value& y) { return zero_wins(x, y, log_plus_one(y)); }),
      elementwise("fmax", [](const Value& a, const Value& b) { return other_if_nan(a, b, hlo::largest(a, b)); }),
      elementwise("fmin", [](const Value& a, const Value& b) { return other_if_nan(a, b, smallest(a, b)); }),
      elementwise("heaviside",
                  [](const Value& x, const Value& at_zero) { return select(compare("EQ", x, 0), at_zero, convert(x > 0, x.element())); }),
      binary("bitwise_left_shift.Tensor __lshift__.Tensor __lshift__.Scalar __ilshift__.Tensor __ilshift__.Scalar", "shift_left"),
      elementwise("bitwise_right_shift.Tensor __rshift__.Tensor __rshift__.Scalar __irshift__.Tensor __irshift__.Scalar", moved_right),
      elementwise("logical_and", [](const Elements& x) { return x.as(0, at::kBool) & x.as(1, at::kBool); }),
      elementwise("logical_or", [](const Elements& x) { return x.as(0, at::kBool) | x.as(1, at::kBool); }),
      elementwise("logical_xor", [](const Elements& x) { return binary("xor", x.as(0, at::kBool), x.as(1, at::kBool)); }),
      comparison("eq.Tensor eq.Scalar", "EQ"),
      comparison("ne.Tensor ne.Scalar", "NE"),
      comparison("lt.Tensor lt.Scalar", "LT"),
      comparison("le.Tensor le.Scalar", "LE"),
      comparison("gt.Tensor gt.Scalar", "GT"),
      comparison("ge.Tensor ge.Scalar", "GE"),

      elementwise("addcmul", [](const Elements& x) { return x[0] + x[1] * x[2] * x[3]; }),
      elementwise("addcdiv", [](const Elements& x) { return x[0] + x[1] / x[2] * x[3]; }),
      elementwise("lerp.Scalar lerp.Tensor", interpolated),
      elementwise("clamp clamp.Tensor", clamped),
      {"where.self", where},
      elementwise("masked_fill_.Scalar masked_fill_.Tensor", [](const Elements& x) { return select(x.as(1, at::kBool), x[2], x[0]); }),
      elementwise("fill_.Scalar fill_.Tensor", [](const Elements& x) { return x[1]; }),
      elementwise("zero_", [](const Elements& x) { return x.filled(0); }),
  });
}

}  // namespace tessera::xla
