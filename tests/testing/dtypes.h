// All dtypes whose tensors files can hold.
#pragma once

#include <c10/core/ScalarType.h>

namespace tessera::testing {

inline constexpr at::ScalarType kAllDtypes[] = {at::kFloat,
                                                at::kDouble,
                                                at::kHalf,
                                                at::kBFloat16,
                                                at::kLong,
                                                at::kInt,
                                                at::kShort,
                                                at::kChar,
                                                at::kByte,
                                                at::kBool,
                                                at::kComplexFloat,
                                                at::kComplexDouble,
                                                at::kComplexHalf,
                                                at::kUInt16,
                                                at::kUInt32,
                                                at::kUInt64,
                                                at::kFloat8_e5m2,
                                                at::kFloat8_e4m3fn,
                                                at::kFloat8_e5m2fnuz,
                                                at::kFloat8_e4m3fnuz,
                                                at::kFloat8_e8m0fnu,
                                                at::kFloat4_e2m1fn_x2};

}  // namespace tessera::testing
