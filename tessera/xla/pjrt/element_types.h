// The types of elements that libtorch and XLA both have.
#pragma once

#include <c10/core/ScalarType.h>

#include <string_view>

namespace tessera::pjrt {

/// As PJRT numbers them. Throws UsageError for a type that XLA does not have.
int element_type(at::ScalarType type);
/// Throws Error for a type that libtorch does not have.
at::ScalarType scalar_type(int element_type);
/// As StableHLO writes it: "f32".
std::string_view element_name(at::ScalarType type);

}  // namespace tessera::pjrt
