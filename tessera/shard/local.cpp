#include "tessera/shard/local.h"

#include <ATen/ATen.h>

#include "tessera/base/error.h"
#include "tessera/base/paging_key.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/storage/paged_tensor.h"
#include "tessera/shard/storage/storage_tag.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {

at::Tensor to_local(const at::Tensor& tensor) {
  const auto* tag = is_paged(tensor) ? tag_of(tensor) : nullptr;
  if (tag != nullptr && tag->role == Role::Unsharded) {
    const auto found = locate(tensor);
    if (found.parameter != nullptr && !found.group->flat) return to_local(found.parameter->shard);
    throw UsageError(
        "to_local was given a view of a whole parameter, or a member of a unit that lists one vector of all parameters (Listing::Flat); pass "
        "one of tessera::parameters(model)");
  }
  if (const auto unit = tag != nullptr ? tag->unit.lock() : nullptr) {
    unit->schedule()->finish_reductions();
    if (tag->role == Role::Sharded && unit->flags().unset > 0) expect_values_of(*unit, tensor, "to_local");
  }
  const BelowPaging below;
  return at::empty(tensor.sizes(), tensor.options()).copy_(tensor);
}

}  // namespace tessera
