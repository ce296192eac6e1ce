// The dtype of buffers, which MixedPrecision::buffer_dtype changes while a model trains. Checkpoints keep the original dtype.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>

namespace torch::nn {
class Module;
}

namespace tessera {

/// Gives the floating-point buffers of the module and of the modules in it this dtype. The tensors stay the same objects. Buffers keep a
/// dtype that an inner module's own setting chose before. Buffers in `ignored` keep their dtype, in later calls too.
void cast_buffers(const torch::nn::Module& module, at::ScalarType dtype, std::span<const at::Tensor> ignored = {});

/// Returns the dtype that a buffer had before cast_buffers(), or its present dtype if it was not cast.
at::ScalarType original_dtype(const at::Tensor& buffer);
/// Whether cast_buffers() has changed the dtype of the buffer.
inline bool is_cast_buffer(const at::Tensor& buffer) {
  return original_dtype(buffer) != buffer.scalar_type();
}

}  // namespace tessera
