#include "tessera/shard/buffers.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include "tessera/base/error.h"
#include "tessera/comm/calling.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/shard/deferred/values.h"

namespace tessera {

at::Tensor synced(const std::string& name, const at::Tensor& buffer, const Communicator& world, BufferSync sync) {
  const c10::AutoGradMode no_grad(false);
  // A buffer, such as a counter, may be on the host while the module computes on a device.
  auto copy = at::empty_like(buffer, buffer.options().device(world.traits().device), at::MemoryFormat::Contiguous).copy_(buffer.detach());
  if (sync == BufferSync::Mean && at::isFloatingType(copy.scalar_type())) {
    world.all_reduce(copy, {.op = Reduce::Mean}, {.unit = name}).wait();
  } else if (sync != BufferSync::None) {
    world.broadcast(copy, 0, {.unit = name}).wait();
  }
  return copy;
}

void sync_buffers(ModuleRef module, const Communicator& world, BufferSync sync) {
  const Calling calling("tessera::sync_buffers");
  if (sync == BufferSync::None) return;
  const c10::AutoGradMode no_grad(false);
  all_or_none(world, {.unit = "sync_buffers"}, "has buffers without values", [&] {
    if (!world.is_first() && sync != BufferSync::Mean) return;
    for (const auto& item : module->named_buffers()) {
      if (!item.value().defined() || !lacks_values(item.value())) continue;
      throw UsageError(
          "the buffer '{}' has no values to send; before sync_buffers, load the module, or call materialize() or fully_shard for a module "
          "from deferred_init",
          item.key());
    }
  });
  for (const auto& item : module->named_buffers()) {
    auto buffer = item.value();
    if (!world.is_first() && lacks_values(buffer)) allocate_values(buffer, world.traits().device);
    if (buffer.defined()) buffer.copy_(synced(item.key(), buffer, world, sync));
  }
}

}  // namespace tessera
