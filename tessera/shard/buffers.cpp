#include "tessera/shard/buffers.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

namespace tessera {

void sync_buffers(const torch::nn::Module& module, const Communicator& world, BufferSync sync) {
  if (sync == BufferSync::None) return;
  const c10::AutoGradMode no_grad(false);
  for (const auto& item : module.named_buffers()) {
    auto buffer = item.value();
    if (!buffer.defined()) continue;
    // Through a copy where it does not lie in one piece.
    const auto whole = buffer.contiguous();
    if (sync == BufferSync::Mean && at::isFloatingType(buffer.scalar_type())) {
      world.all_reduce(whole, {.op = Reduce::Mean}, {.unit = item.key()}).wait();
    } else {
      world.broadcast(whole, 0, {.unit = item.key()}).wait();
    }
    if (!whole.is_same(buffer)) buffer.copy_(whole);
  }
}

}  // namespace tessera
