// The names of dtypes in files.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>
#include <string_view>

namespace tessera::checkpoint {

struct TorchDtype {
  at::ScalarType type;
  const char* name;                   // in Python's module torch
  const char* storage = nullptr;      // the class of its storages there; newer dtypes have none
  const char* safetensors = nullptr;  // in safetensors files and manifests; not all have one
};
/// nullptr for a dtype that has no values of whole bytes.
const TorchDtype* torch_dtype(at::ScalarType type);
/// From "torch.float32", or nullptr.
const TorchDtype* torch_dtype_named(std::string_view global);
/// From "torch.FloatStorage", or nullptr.
const TorchDtype* torch_dtype_of_storage(std::string_view global);

/// The name in safetensors files and manifests; null if there is none.
const char* name_of(at::ScalarType type);
/// Throws IoError if there is no such dtype, or libtorch has none like it.
at::ScalarType dtype_named(const std::string& name);

}  // namespace tessera::checkpoint
