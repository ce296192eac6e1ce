// Shorthand for arithmetic on values of one type and shape.
#pragma once

#include <c10/util/accumulate.h>

#include <type_traits>

#include "tessera/xla/graph/ops.h"

namespace tessera::xla::hlo {

inline Value plus(const Value& a, const Value& b) { return binary("add", a, b); }
inline Value minus(const Value& a, const Value& b) { return binary("subtract", a, b); }
inline Value times(const Value& a, const Value& b) { return binary("multiply", a, b); }
inline Value over(const Value& a, const Value& b) { return binary("divide", a, b); }

/// A constant in the shape of `x`, part of the program's text: for numbers that follow from shapes.
template <class Number>
Value fixed(const Value& x, Number number) {
  using Constant = std::conditional_t<std::is_integral_v<Number>, int64_t, double>;
  return broadcast(constant(static_cast<Constant>(number), x.element()), x.sizes(), {});
}
/// A number in the shape of `x` that may differ from run to run: an argument of the program.
inline Value like(const Value& x, double number) { return full(number, x.type()); }

inline Value flat(const Value& x) { return reshape(x, {c10::multiply_integers(x.sizes())}); }

inline Value both(const Value& a, const Value& b) { return binary("and", a, b); }
inline Value either(const Value& a, const Value& b) { return binary("or", a, b); }
inline Value opposite(const Value& truth) { return unary("not", truth); }
inline Value is_below(const Value& a, const Value& b) { return compare("LT", a, b); }
inline Value is_above(const Value& a, const Value& b) { return compare("GT", a, b); }
inline Value is_negative(const Value& x) { return is_below(x, fixed(x, 0)); }
inline Value is_nan(const Value& x) { return compare("NE", x, x); }
inline Value largest(const Value& a, const Value& b) { return binary("maximum", a, b); }
inline Value smallest(const Value& a, const Value& b) { return binary("minimum", a, b); }
inline Value exponential(const Value& x) { return unary("exponential", x); }
inline Value logarithm(const Value& x) { return unary("log", x); }
inline Value log_plus_one(const Value& x) { return unary("log_plus_one", x); }
inline Value root(const Value& x) { return unary("sqrt", x); }
inline Value magnitude(const Value& x) { return c10::isIntegralType(x.element(), true) && !c10::isSignedType(x.element()) ? x : unary("abs", x); }
inline Value negated(const Value& x) { return unary("negate", x); }
inline Value logistic(const Value& x) { return unary("logistic", x); }
/// Rounds towards zero.
inline Value truncated(const Value& x) { return select(is_negative(x), unary("ceil", x), unary("floor", x)); }

/// The type in which half types are computed, as libtorch does.
inline at::ScalarType wide(at::ScalarType element) { return element == at::kBFloat16 || element == at::kHalf ? at::kFloat : element; }

}  // namespace tessera::xla::hlo
