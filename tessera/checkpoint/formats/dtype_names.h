// The names of dtypes in files.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>
#include <string_view>

namespace tessera::checkpoint {

struct TorchDtype {
  at::ScalarType type;
  const char* name;                   // its name in Python's module torch
  const char* storage = nullptr;      // the name of its storage class in that module; null for newer dtypes
  const char* safetensors = nullptr;  // its name in safetensors files and manifests; null if the format lacks the dtype
};
/// Returns nullptr for a dtype that can't be saved, such as those of quantized tensors.
const TorchDtype* torch_dtype(at::ScalarType type);
/// Finds the dtype by its name in Python ("torch.float32"), or returns nullptr.
const TorchDtype* torch_dtype_named(std::string_view global);
/// Finds the dtype by the name of its storage class ("torch.FloatStorage"), or returns nullptr.
const TorchDtype* torch_dtype_of_storage(std::string_view global);

/// Returns TorchDtype::safetensors, which may be null.
const char* name_of(at::ScalarType type);
/// Finds the dtype by TorchDtype::safetensors. Throws IoError for a name that is not in the table, for example because libtorch has no such
/// dtype.
at::ScalarType dtype_named(const std::string& name);

}  // namespace tessera::checkpoint
