#include "tessera/checkpoint/formats/dtype_names.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "tessera/base/error.h"

namespace tessera::checkpoint {
namespace {

using enum at::ScalarType;
constexpr TorchDtype kDtypes[] = {{Double, "float64", "DoubleStorage", "F64"},
                                  {Float, "float32", "FloatStorage", "F32"},
                                  {Half, "float16", "HalfStorage", "F16"},
                                  {BFloat16, "bfloat16", "BFloat16Storage", "BF16"},
                                  {Long, "int64", "LongStorage", "I64"},
                                  {Int, "int32", "IntStorage", "I32"},
                                  {Short, "int16", "ShortStorage", "I16"},
                                  {Char, "int8", "CharStorage", "I8"},
                                  {UInt64, "uint64", nullptr, "U64"},
                                  {UInt32, "uint32", nullptr, "U32"},
                                  {UInt16, "uint16", nullptr, "U16"},
                                  {Byte, "uint8", "ByteStorage", "U8"},
                                  {Bool, "bool", "BoolStorage", "BOOL"},
                                  {ComplexFloat, "complex64", "ComplexFloatStorage", "C64"},
                                  {ComplexDouble, "complex128", "ComplexDoubleStorage"},
                                  {ComplexHalf, "complex32"},
                                  {Float8_e5m2, "float8_e5m2", nullptr, "F8_E5M2"},
                                  {Float8_e4m3fn, "float8_e4m3fn", nullptr, "F8_E4M3"},
                                  {Float8_e8m0fnu, "float8_e8m0fnu", nullptr, "F8_E8M0"},
                                  {Float8_e5m2fnuz, "float8_e5m2fnuz", nullptr, "F8_E5M2FNUZ"},
                                  {Float8_e4m3fnuz, "float8_e4m3fnuz", nullptr, "F8_E4M3FNUZ"},
                                  {Float4_e2m1fn_x2, "float4_e2m1fn_x2"}};

/// Returns the dtype with this name in a column of kDtypes, or nullptr.
const TorchDtype* dtype_with(const char* TorchDtype::*column, std::string_view name) {
  const auto* const found =
      std::ranges::find_if(kDtypes, [&](const TorchDtype& dtype) { return dtype.*column != nullptr && dtype.*column == name; });
  return found == std::end(kDtypes) ? nullptr : found;
}

const TorchDtype* dtype_of_torch(const char* TorchDtype::*column, std::string_view global) {
  constexpr std::string_view kTorch = "torch.";
  return global.starts_with(kTorch) ? dtype_with(column, global.substr(kTorch.size())) : nullptr;
}

}  // namespace

const TorchDtype* torch_dtype(at::ScalarType type) {
  const auto* const found = std::ranges::find(kDtypes, type, &TorchDtype::type);
  return found == std::end(kDtypes) ? nullptr : found;
}

const TorchDtype* torch_dtype_named(std::string_view global) {
  return dtype_of_torch(&TorchDtype::name, global);
}

const TorchDtype* torch_dtype_of_storage(std::string_view global) {
  return dtype_of_torch(&TorchDtype::storage, global);
}

const char* name_of(at::ScalarType type) {
  const auto* const found = torch_dtype(type);
  return found == nullptr ? nullptr : found->safetensors;
}

at::ScalarType dtype_named(const std::string& name) {
  if (const auto* const found = dtype_with(&TorchDtype::safetensors, name)) return found->type;
  std::vector<const char*> known;
  for (const auto& each : kDtypes) {
    if (each.safetensors != nullptr) known.push_back(each.safetensors);
  }
  throw IoError("has the dtype {}, which is not one of {}", nlohmann::json(name).dump(), joined(known));
}

}  // namespace tessera::checkpoint
