#include "tessera/shard/local.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "tessera/base/error.h"
#include "tessera/shard/paging/paged_tensor.h"
#include "tessera/shard/paging/storage_tag.h"
#include "tessera/shard/unit/schedule.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {

at::Tensor to_local(const at::Tensor& tensor) {
  const auto* tag = is_paged(tensor) ? tag_of(tensor) : nullptr;
  if (tag != nullptr && tag->role == Role::Unsharded) {
    throw UsageError(
        "to_local takes shards, which model->parameters() returns; this is a whole parameter, of which no rank has a part of its own");
  }
  if (const auto unit = tag != nullptr ? tag->unit.lock() : nullptr) unit->schedule()->finish_reductions();
  const c10::AutoGradMode no_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  return at::empty(tensor.sizes(), tensor.options()).copy_(tensor);
}

}  // namespace tessera
