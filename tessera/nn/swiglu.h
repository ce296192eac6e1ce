// SwiGLU and GeGLU: silu(gate) * up and gelu(gate) * up, with their own backward.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::nn {

/// silu(gate) * up, for tensors of the same sizes. Saves only `gate` and `up` for backward.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);
/// The same with gelu by tanh in place of silu.
at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up);

}  // namespace tessera::nn
