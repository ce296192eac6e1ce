#include "tessera/shard/local.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "tessera/base/error.h"
#include "tessera/shard/marker.h"
#include "tessera/shard/schedule.h"
#include "tessera/shard/unit.h"

namespace tessera {

at::Tensor to_local(const at::Tensor& tensor) {
  const auto* marker = is_paged(tensor) ? marker_of(tensor) : nullptr;
  if (marker != nullptr && marker->role == Role::Full) {
    throw UsageError(
        "to_local takes shards, which model->parameters() returns; this is a whole parameter, of which no rank has a part of its own");
  }
  if (const auto unit = marker != nullptr ? marker->unit.lock() : nullptr) unit->schedule()->finish_reductions();
  const c10::AutoGradMode no_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  return at::empty(tensor.sizes(), tensor.options()).copy_(tensor);
}

}  // namespace tessera
