// Products of bfloat16 and float16 on processors without instructions for them.
#pragma once

#include <c10/core/ScalarType.h>

namespace tessera {

/// Whether libtorch multiplies matrices of this dtype on the CPU by a plain loop, many times slower than in float32. Where that is so,
/// loading the library replaces libtorch's kernels for matrix products, convolutions and attention on CPUs: they compute in float32 and
/// round once, in forward and backward, sharded or not. The first such product on a host logs a warning.
bool multiplies_slowly(at::ScalarType dtype);

}  // namespace tessera
