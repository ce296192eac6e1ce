#include "tessera/shard/access/shard_place.h"

#include "tessera/comm/groups/group_list.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/storage/storage_tag.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {

const Mesh& ShardPlace::mesh() const {
  return unit->mesh();
}

bool ShardPlace::is_on_all_ranks() const {
  return same_ranks(mesh().world(), unit->schedule()->world());
}

Listing ShardPlace::listing() const {
  return unit->options().listing;
}

bool ShardPlace::is_cut_at_multiples_of(int64_t values) const {
  const auto& group = *static_cast<const Unit::Group*>(buffer);
  const auto& span = group.listed()[index].span;
  if (group.chunk == 0) return true;
  for (auto cut = (span.offset / group.chunk + 1) * group.chunk; cut < span.offset + span.numel; cut += group.chunk) {
    if ((cut - span.offset) % values != 0) return false;
  }
  return true;
}

bool ShardPlace::is_offloaded() const {
  return unit->is_offloaded();
}

ShardPlace place_of(const at::Tensor& shard) {
  auto found = locate(shard);
  if (found.parameter == nullptr) return {};
  const auto* const first = found.group->parameters.data();
  const bool listed_flat = found.group->flat && found.parameter == &*found.group->flat;
  return {.unit = std::move(found.unit), .buffer = found.group, .index = listed_flat ? 0 : static_cast<size_t>(found.parameter - first)};
}

bool is_unsharded_form(const at::Tensor& parameter) {
  const auto* const tag = tag_of(parameter);
  return tag != nullptr && tag->role == Role::Unsharded;
}

}  // namespace tessera
