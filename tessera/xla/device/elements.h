// Operators that compute each element of the result from the elements at the same place of the arguments.
#pragma once

#include "tessera/xla/device/kernels.h"
#include "tessera/xla/graph/arithmetic.h"

namespace tessera::xla {

/// The arguments of one call, converted to one type and expanded to one shape.
class Elements {
 public:
  /// `element` is the type in which the operator computes.
  Elements(const Call& call, at::ScalarType element);

  Value operator[](size_t i) const { return as(i, element_); }
  Value as(size_t i, at::ScalarType element) const { return expand(call_.value(i, element), sizes_); }
  Value filled(double number) const { return hlo::filled(number, {element_, sizes_}); }
  /// Returns a number that is an argument of the program, because it may differ from run to run.
  Value full(double number) const { return hlo::full(number, {element_, sizes_}); }
  /// Returns full() of argument `i`, or of `otherwise` if the argument is None.
  Value number(size_t i, double otherwise = 0) const { return full(call_.has(i) ? call_.number(i) : otherwise); }
  const Call& call() const { return call_; }
  at::ScalarType element() const { return element_; }
  const Sizes& sizes() const { return sizes_; }

 private:
  const Call& call_;
  at::ScalarType element_;
  Sizes sizes_;
};

/// The type to which libtorch's rules promote all tensors and numbers of a call.
at::ScalarType common_type(const Call& call);
/// The type of the result. If the caller gave a tensor for the result, that tensor's type; otherwise, the type to which libtorch's rules
/// promote all tensors and, if it is a number, the first argument.
at::ScalarType type_of_operands(const Call& call);

/// Calls `of` with a zero of the type, or with a float zero if the type is neither double nor a half type.
template <class Of>
auto of_floating_type(at::ScalarType type, const Of& of) {
  switch (type) {
    case at::kDouble:
      return of(double{});
    case at::kHalf:
      return of(c10::Half{});
    case at::kBFloat16:
      return of(c10::BFloat16{});
    default:
      return of(float{});
  }
}

/// Returns the type if it is floating-point, and the default dtype otherwise.
inline at::ScalarType fractional(at::ScalarType type) {
  return c10::isFloatingType(type) ? type : c10::typeMetaToScalarType(c10::get_default_dtype());
}

/// Calls `compute` with `x` or with the first one, two or three values of `x`, whichever it takes.
template <class Compute>
Value applied(const Compute& compute, const Elements& x) {
  if constexpr (std::is_invocable_v<Compute, const Elements&>) {
    return compute(x);
  } else if constexpr (std::is_invocable_v<Compute, Value>) {
    return compute(x[0]);
  } else if constexpr (std::is_invocable_v<Compute, Value, Value>) {
    return compute(x[0], x[1]);
  } else {
    return compute(x[0], x[1], x[2]);
  }
}

/// Makes a kernel that computes in the type of its result, or in float if that is a half type.
template <class Compute>
Kernel elementwise(const char* names, Compute compute) {
  return {names, [compute](Call& call) {
            const auto type = type_of_operands(call);
            call.give(convert(applied(compute, Elements(call, hlo::wide(type))), type));
          }};
}

/// Makes a kernel that computes in the common type of its arguments. If the caller gave a tensor for the result, the result gets that
/// tensor's type, otherwise bool.
template <class Compute>
Kernel comparison(const char* names, Compute compute) {
  return {names, [compute](Call& call) {
            call.give(convert(applied(compute, Elements(call, common_type(call))), call.out() ? call.result_type() : at::kBool));
          }};
}

inline Kernel unary(const char* names, const char* operation) {
  return elementwise(names, [operation](const Value& x) { return unary(operation, x); });
}
inline Kernel binary(const char* names, const char* operation) {
  return elementwise(names, [operation](const Value& a, const Value& b) { return binary(operation, a, b); });
}
inline Kernel comparison(const char* names, const char* direction) {
  return comparison(names, [direction](const Value& a, const Value& b) { return compare(direction, a, b); });
}

/// Divides and rounds down, as Python does.
Value floor_divided(const Value& a, const Value& b);

}  // namespace tessera::xla
