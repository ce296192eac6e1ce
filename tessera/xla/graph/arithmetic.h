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

/// A number in the shape of `x`, which the program's text has: for what follows from shapes.
template <class Number>
Value fixed(const Value& x, Number number) {
  using Constant = std::conditional_t<std::is_integral_v<Number>, int64_t, double>;
  return broadcast(constant(static_cast<Constant>(number), x.element()), x.sizes(), {});
}
/// A number in the shape of `x`, which may differ from run to run.
inline Value like(const Value& x, double number) { return full(number, x.type()); }

inline Value flat(const Value& x) { return reshape(x, {c10::multiply_integers(x.sizes())}); }

/// The type in which half types are computed, as libtorch does.
inline at::ScalarType wide(at::ScalarType element) { return element == at::kBFloat16 || element == at::kHalf ? at::kFloat : element; }

}  // namespace tessera::xla::hlo
