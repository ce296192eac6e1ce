// The sum of gradients: what a reduction spends its time on.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>

namespace tessera {

/// result[i] = (rows[0][i] + rows[1][i] + ...) / divisor, added in float32 and in this order; adds the squares of that to `squares`, if
/// given. No bit depends on the number of threads. False, and nothing done, for what it has no loop for: it wants contiguous rows of
/// float32 or bfloat16 in host memory. The result, in float32, may be one of the rows.
bool add_rows(std::span<const at::Tensor> rows, const at::Tensor& result, float divisor, double* squares = nullptr);

}  // namespace tessera
