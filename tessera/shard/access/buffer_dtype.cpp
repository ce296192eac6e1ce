#include "tessera/shard/access/buffer_dtype.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>

namespace tessera {
namespace {

/// The dtype of a buffer before it was cast. Attached to the buffer, so that it is destroyed with the buffer.
struct OriginalDtype : c10::BackendMeta {
  explicit OriginalDtype(at::ScalarType dtype) : dtype(dtype) {}
  at::ScalarType dtype;
};

const OriginalDtype* original(const at::Tensor& buffer) {
  return dynamic_cast<const OriginalDtype*>(buffer.unsafeGetTensorImpl()->get_backend_meta());
}

}  // namespace

void cast_buffers(const torch::nn::Module& module, at::ScalarType dtype, std::span<const at::Tensor> ignored) {
  const c10::AutoGradMode no_grad(false);
  for (auto& buffer : module.buffers()) {
    if (!buffer.defined() || !at::isFloatingType(buffer.scalar_type()) || original(buffer) != nullptr) continue;
    const auto before = buffer.scalar_type();
    const bool keeps = std::ranges::any_of(ignored, [&](const at::Tensor& tensor) { return tensor.is_same(buffer); });
    if (before != dtype && !keeps) buffer.set_data(buffer.to(dtype));
    buffer.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<OriginalDtype>(before));
  }
}

at::ScalarType original_dtype(const at::Tensor& buffer) {
  const auto* const known = original(buffer);
  return known != nullptr ? known->dtype : buffer.scalar_type();
}

}  // namespace tessera
