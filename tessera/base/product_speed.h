// Measures how fast a matrix product is.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <cstdint>

namespace tessera {

/// The floating-point operations per second of products of square matrices with this dtype and device: the best of some tries, which take a
/// tenth of a second in all, and longer if a product takes long. A rank alone on a host is faster than all of them at once, so let all ranks
/// call it together.
double product_speed(const at::TensorOptions& options, int64_t side);

}  // namespace tessera
