// Element types that libtorch and XLA both have.
#pragma once

#include <c10/core/ScalarType.h>

#include <string_view>

namespace tessera::pjrt {

/// Returns PJRT's number of a type. Throws UsageError for a type that XLA does not have.
int element_type(at::ScalarType type);
/// Returns the type of PJRT's number. Throws Error for a type that libtorch does not have.
at::ScalarType scalar_type(int element_type);
/// Returns StableHLO's name of a type, such as "f32".
std::string_view element_name(at::ScalarType type);

}  // namespace tessera::pjrt
