// C++ operators for arithmetic on values of the graph that have one type and shape.
#pragma once

#include <c10/util/accumulate.h>

#include <concepts>
#include <type_traits>

#include "tessera/xla/graph/ops.h"

namespace tessera::xla::hlo {

template <class T>
concept Number = std::is_arithmetic_v<T>;

/// Returns an array of one number, which is a constant in the program's text. Use it for numbers that follow from shapes.
template <Number N>
Value filled(N number, const Type& type) {
  return broadcast(constant(static_cast<std::conditional_t<std::is_integral_v<N>, int64_t, double>>(number), type.element), type.sizes, {});
}
/// Returns filled() with the type and shape of `x`.
Value fixed(const Value& x, Number auto number) { return filled(number, x.type()); }
/// Returns an array of the type and shape of `x` with one number, which is an argument of the program. Use it for numbers that may differ
/// from run to run.
inline Value like(const Value& x, double number) { return full(number, x.type()); }

inline Value flat(const Value& x) { return reshape(x, {c10::multiply_integers(x.sizes())}); }

// A number as an operand becomes a constant of the other operand's type and shape.

Value binary(const char* operation, const Value& a, Number auto b) { return binary(operation, a, fixed(a, b)); }
Value binary(const char* operation, Number auto a, const Value& b) { return binary(operation, fixed(b, a), b); }
Value compare(const char* direction, const Value& a, Number auto b) { return compare(direction, a, fixed(a, b)); }
Value select(const Value& condition, const Value& yes, Number auto no) { return select(condition, yes, fixed(yes, no)); }
Value select(const Value& condition, Number auto yes, const Value& no) { return select(condition, fixed(no, yes), no); }
inline Value largest(const Value& a, const auto& b) { return binary("maximum", a, b); }
inline Value smallest(const Value& a, const auto& b) { return binary("minimum", a, b); }

inline Value opposite(const Value& truth) { return unary("not", truth); }
inline Value is_nan(const Value& x) { return compare("NE", x, x); }
inline Value exponential(const Value& x) { return unary("exponential", x); }
inline Value logarithm(const Value& x) { return unary("log", x); }
inline Value log_plus_one(const Value& x) { return unary("log_plus_one", x); }
inline Value root(const Value& x) { return unary("sqrt", x); }
inline Value magnitude(const Value& x) { return c10::isIntegralType(x.element(), true) && !c10::isSignedType(x.element()) ? x : unary("abs", x); }
inline Value logistic(const Value& x) { return unary("logistic", x); }
/// The type in which elements are computed: float for half types, as in libtorch.
inline at::ScalarType wide(at::ScalarType element) { return element == at::kBFloat16 || element == at::kHalf ? at::kFloat : element; }

template <class A, class B>
concept OneIsValue = std::same_as<A, Value> || std::same_as<B, Value>;

template <class A, class B> requires OneIsValue<A, B> Value operator+(const A& a, const B& b) { return binary("add", a, b); }
template <class A, class B> requires OneIsValue<A, B> Value operator-(const A& a, const B& b) { return binary("subtract", a, b); }
template <class A, class B> requires OneIsValue<A, B> Value operator*(const A& a, const B& b) { return binary("multiply", a, b); }
template <class A, class B> requires OneIsValue<A, B> Value operator/(const A& a, const B& b) { return binary("divide", a, b); }
inline Value operator-(const Value& x) { return unary("negate", x); }
inline Value operator&(const Value& a, const Value& b) { return binary("and", a, b); }
inline Value operator|(const Value& a, const Value& b) { return binary("or", a, b); }
inline Value operator<(const Value& a, const auto& b) { return compare("LT", a, b); }
inline Value operator>(const Value& a, const auto& b) { return compare("GT", a, b); }
inline Value operator<=(const Value& a, const auto& b) { return compare("LE", a, b); }
inline Value operator>=(const Value& a, const auto& b) { return compare("GE", a, b); }

/// Derivatives of logistic and of tanh as functions of their results `y`.
inline Value logistic_slope(const Value& y) { return y * (1 - y); }
inline Value tangent_slope(const Value& y) { return 1 - y * y; }

/// Rounds towards zero.
inline Value truncated(const Value& x) { return select(x < 0, unary("ceil", x), unary("floor", x)); }

}  // namespace tessera::xla::hlo
