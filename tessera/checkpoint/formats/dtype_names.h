// The names of dtypes in safetensors files, which manifests use as well.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>

namespace tessera::checkpoint {

/// Null if the format has no name for it.
const char* name_of(at::ScalarType type);
/// Throws IoError if there is no such dtype, or libtorch has none like it.
at::ScalarType dtype_named(const std::string& name);

}  // namespace tessera::checkpoint
