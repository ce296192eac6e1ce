// Converts values to a narrower dtype.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "tessera/base/error.h"

namespace tessera::checkpoint {

/// Throws UsageError, with the tensor's name, if a finite value would become infinite, because the dtype can't hold it. Does not check
/// 8-bit dtypes.
inline at::Tensor narrowed(const at::Tensor& values, at::ScalarType dtype, const std::string& name) {
  auto result = values.to(dtype);
  const bool is_wide = at::isFloatingType(values.scalar_type()) && c10::elementSize(values.scalar_type()) > 1;
  if (!is_wide || !at::isFloatingType(dtype) || c10::elementSize(dtype) == 1) return result;
  const auto lost = result.isinf().logical_and_(values.isfinite());
  if (!lost.any().item<bool>()) return result;
  throw UsageError("'{}' has values up to {}, which {} can't hold; take a dtype that can", name,
                   values.abs().masked_fill(lost.logical_not(), 0).max().item<double>(), c10::toString(dtype));
}

}  // namespace tessera::checkpoint
