// The sum of all ranks' gradients, in which a reduction spends most of its time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>

namespace tessera {

/// result[i] = (rows[0][i] + rows[1][i] + ...) / divisor, added in float32 and in this order. Adds the squares of the results to `squares`,
/// if given. The bits do not depend on the number of threads. `result` is float32, and may be one of the rows. The rows, each as long as
/// the result, must be float32 or bfloat16, and the result must be contiguous; otherwise add_rows() does nothing and returns false.
bool add_rows(std::span<const std::span<const std::byte>> rows, at::ScalarType dtype, const at::Tensor& result, float divisor,
              double* squares = nullptr);

}  // namespace tessera
