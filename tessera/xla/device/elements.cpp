#include "tessera/xla/device/elements.h"

#include <ATen/ExpandUtils.h>
#include <ATen/native/TypeProperties.h>

namespace tessera::xla {

Elements::Elements(const Call& call, at::ScalarType element) : call_(call), element_(element) {
  for (size_t i = 0; i < call.arguments(); i++) {
    if (call.peek(i).isTensor() && call.has(i)) sizes_ = at::infer_size(sizes_, call.peek(i).toTensor().sizes());
  }
}

namespace {

enum class Numbers { All, First };

at::ScalarType type_of(const Call& call, Numbers numbers) {
  at::native::ResultTypeState state = {};
  for (size_t i = 0; i < call.arguments(); i++) {
    const auto& given = call.peek(i);
    if (given.isTensor() && call.has(i)) state = at::native::update_result_type_state(given.toTensor(), state);
    if (given.isScalar() && (i == 0 || numbers == Numbers::All)) state = at::native::update_result_type_state(given.toScalar(), state);
  }
  return at::native::result_type(state);
}

}  // namespace

at::ScalarType common_type(const Call& call) {
  return type_of(call, Numbers::All);
}

at::ScalarType type_of_operands(const Call& call) {
  return call.out() ? call.result_type() : type_of(call, Numbers::First);
}

Value floor_divided(const Value& a, const Value& b) {
  if (!c10::isFloatingType(a.element())) {
    const auto quotient = a / b;
    if (!c10::isSignedType(a.element())) return quotient;
    const auto inexact = compare("NE", quotient * b, a);
    const auto signs = compare("NE", a < 0, b < 0);
    return select(inexact & signs, quotient - 1, quotient);
  }
  // The remainder is exact, so (a - rest) / b would be a whole number without rounding errors. round_nearest_even removes these.
  const auto rest = binary("remainder", a, b), quotient = (a - rest) / b, zero = fixed(a, 0);
  const auto below = compare("NE", rest, zero) & compare("NE", b < 0, rest < 0);
  const auto whole = unary("round_nearest_even", select(below, quotient - 1, quotient));
  return select(compare("EQ", b, zero), a / b, whole);
}

}  // namespace tessera::xla
