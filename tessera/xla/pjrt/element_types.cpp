#include "tessera/xla/pjrt/element_types.h"

#include <pjrt_c_api.h>

#include <algorithm>
#include <array>

#include "tessera/base/error.h"

namespace tessera::pjrt {
namespace {

struct ElementType {
  at::ScalarType torch;
  int pjrt;
  std::string_view name;
};

constexpr std::array kElementTypes = {
    ElementType{at::kFloat, PJRT_Buffer_Type_F32, "f32"},
    ElementType{at::kBFloat16, PJRT_Buffer_Type_BF16, "bf16"},
    ElementType{at::kHalf, PJRT_Buffer_Type_F16, "f16"},
    ElementType{at::kDouble, PJRT_Buffer_Type_F64, "f64"},
    ElementType{at::kLong, PJRT_Buffer_Type_S64, "i64"},
    ElementType{at::kInt, PJRT_Buffer_Type_S32, "i32"},
    ElementType{at::kShort, PJRT_Buffer_Type_S16, "i16"},
    ElementType{at::kChar, PJRT_Buffer_Type_S8, "i8"},
    ElementType{at::kByte, PJRT_Buffer_Type_U8, "ui8"},
    ElementType{at::kUInt16, PJRT_Buffer_Type_U16, "ui16"},
    ElementType{at::kUInt32, PJRT_Buffer_Type_U32, "ui32"},
    ElementType{at::kUInt64, PJRT_Buffer_Type_U64, "ui64"},
    ElementType{at::kBool, PJRT_Buffer_Type_PRED, "i1"},
    ElementType{at::kComplexFloat, PJRT_Buffer_Type_C64, "complex<f32>"},
    ElementType{at::kComplexDouble, PJRT_Buffer_Type_C128, "complex<f64>"},
};

const ElementType& row_of(at::ScalarType type) {
  const auto row = std::ranges::find(kElementTypes, type, &ElementType::torch);
  if (row == kElementTypes.end()) throw UsageError("XLA devices have no elements of type {}: convert the tensor to another dtype", c10::toString(type));
  return *row;
}

}  // namespace

int element_type(at::ScalarType type) { return row_of(type).pjrt; }

std::string_view element_name(at::ScalarType type) { return row_of(type).name; }

at::ScalarType scalar_type(int element_type) {
  const auto row = std::ranges::find(kElementTypes, element_type, &ElementType::pjrt);
  if (row == kElementTypes.end()) throw Error("libtorch has no dtype for PJRT's element type {}", element_type);
  return row->torch;
}

}  // namespace tessera::pjrt
