#include "tessera/xla/device/elements.h"

#include <ATen/ExpandUtils.h>
#include <ATen/native/TypeProperties.h>

namespace tessera::xla {

using hlo::both;
using hlo::compare;
using hlo::fixed;
using hlo::minus;
using hlo::over;
using hlo::select;
using hlo::times;

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

at::ScalarType common_type(const Call& call) { return type_of(call, Numbers::All); }

at::ScalarType type_of_operands(const Call& call) { return call.out() ? call.result_type() : type_of(call, Numbers::First); }

Value floor_divided(const Value& a, const Value& b) {
  if (!c10::isFloatingType(a.element())) {
    const auto quotient = over(a, b);
    if (!c10::isSignedType(a.element())) return quotient;
    const auto inexact = compare("NE", times(quotient, b), a);
    const auto signs = compare("NE", hlo::is_negative(a), hlo::is_negative(b));
    return select(both(inexact, signs), minus(quotient, fixed(a, 1)), quotient);
  }
  // The remainder is exact, so (a - rest) / b is a whole number except for its own rounding.
  const auto rest = hlo::binary("remainder", a, b), quotient = over(minus(a, rest), b), zero = fixed(a, 0);
  const auto below = both(compare("NE", rest, zero), compare("NE", hlo::is_negative(b), hlo::is_negative(rest)));
  const auto whole = hlo::unary("round_nearest_even", select(below, minus(quotient, fixed(a, 1)), quotient));
  return select(compare("EQ", b, zero), over(a, b), whole);
}

}  // namespace tessera::xla
