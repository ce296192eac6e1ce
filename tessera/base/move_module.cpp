#include "tessera/base/move_module.h"

#include <ATen/core/grad_mode.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace tessera {

void move_module(ModuleRef module, c10::Device device) {
  const at::NoGradGuard no_grad;
  const auto move = [&](const at::Tensor& tensor) {
    const bool has_values = tensor.defined() && tensor.device().type() != c10::kMeta && tensor.device() != device;
    if (has_values) tensor.unsafeGetTensorImpl()->shallow_copy_from(tensor.to(device).getIntrusivePtr());
  };
  for (const auto& parameter : module->parameters()) move(parameter);
  for (const auto& buffer : module->buffers()) move(buffer);
}

}  // namespace tessera
