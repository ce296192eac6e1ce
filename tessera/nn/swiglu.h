// SwiGLU: silu(gate) * up, with its own backward.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::nn {

/// silu(gate) * up, for tensors of the same sizes. Saves only `gate` and `up` for backward.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

}  // namespace tessera::nn
