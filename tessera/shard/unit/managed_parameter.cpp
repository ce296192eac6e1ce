#include "tessera/shard/unit/managed_parameter.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "tessera/base/compat.h"
#include "tessera/base/error.h"
#include "tessera/base/sweep.h"
#include "tessera/shard/storage/storage_tag.h"

namespace tessera {

/// The values that a tensor occupies in its storage.
struct Extent {
  std::string name;
  std::vector<int64_t> sizes, strides;
  int64_t begin = 0, end = 0;  // index of the first value, and the index after the last value
  int64_t width = 0;           // bytes per value

  Extent(std::string name, const at::Tensor& tensor)
      : name(std::move(name)),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        begin(tensor.storage_offset()),
        end(begin),
        width(static_cast<int64_t>(tensor.element_size())) {
    if (tensor.numel() == 0) return;
    end++;
    for (size_t i = 0; i < sizes.size(); i++) end += (sizes[i] - 1) * strides[i];
  }
};

namespace {

bool overlap(const Extent& one, const Extent& other) {
  if (one.begin * one.width >= other.end * other.width || other.begin * other.width >= one.end * one.width) return false;
  if (one.width != other.width) return true;
  // Tensors whose ranges overlap need not have a value in common: two columns of a matrix have none.
  const auto begin = std::min(one.begin, other.begin);
  const auto used = at::zeros({std::max(one.end, other.end) - begin}, at::kByte);
  used.as_strided(one.sizes, one.strides, one.begin - begin).fill_(1);
  return used.as_strided(other.sizes, other.strides, other.begin - begin).any().item<bool>();
}

bool overlaps_itself(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) return false;
  const Extent extent({}, tensor);
  const auto places = at::arange(extent.end - extent.begin).as_strided(extent.sizes, extent.strides, 0);
  return std::get<0>(at::_unique(places)).numel() != tensor.numel();
}

/// Former memory of sharded parameters to which a tensor still refers, and the places of the parameters in it.
struct Closed {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  std::vector<Extent> extents;
};

struct ClosedMemory {
  std::mutex mutex;
  std::map<const c10::StorageImpl*, Closed> closed;
  Sweep sweep;
};

ClosedMemory& closed_memory() {
  static auto* const instance = new ClosedMemory;
  return *instance;
}

/// Returns where parameters that were sharded earlier lay in this storage.
std::vector<Extent> former_extents(const c10::StorageImpl* storage) {
  auto& [mutex, closed, sweep] = closed_memory();
  const std::lock_guard lock(mutex);
  sweep(closed, [](const auto& entry) { return entry.second.storage.expired(); });
  const auto found = closed.find(storage);
  return found == closed.end() || found->second.storage.expired() ? std::vector<Extent>() : found->second.extents;
}

void expect_memory_of_its_own(std::span<const ManagedParameter> managed) {
  std::map<const c10::StorageImpl*, std::vector<Extent>> places;
  for (const auto& parameter : managed) {
    auto& extents = places.try_emplace(storage_of(parameter.tensor), former_extents(storage_of(parameter.tensor))).first->second;
    extents.emplace_back(parameter.name, parameter.tensor);
  }
  for (auto& [storage, extents] : places) {
    std::ranges::sort(extents, {}, [](const Extent& extent) { return extent.begin * extent.width; });
    for (size_t i = 0; i < extents.size(); i++) {
      for (size_t j = i + 1; j < extents.size() && extents[j].begin * extents[j].width < extents[i].end * extents[i].width; j++) {
        if (!overlap(extents[i], extents[j])) continue;
        throw UsageError(
            "parameters '{}' and '{}' share memory, but are two tensors (set_data, or views of one buffer?): each would train "
            "its own copy. To tie them, register the same tensor under both names; to untie them, clone() one",
            extents[i].name, extents[j].name);
      }
    }
  }
}

void expect_shardable(const ManagedParameter& parameter) {
  const auto& tensor = parameter.tensor;
  const auto refuse = [&](std::string_view why) { throw UsageError("parameter '{}' {}", parameter.name, why); };
  if (tensor.layout() != at::kStrided) refuse("is sparse or otherwise not strided; only strided parameters can be sharded");
  if (overlaps_itself(tensor)) refuse("overlaps itself (is it expanded?); register a clone() of it");
  if (!tensor.is_leaf()) refuse("is the result of an operation, not a leaf; register a detached copy");
  if (tensor.grad().defined()) {
    refuse("has a gradient already, which was not averaged over the ranks; step and zero_grad() before fully_shard, or shard earlier");
  }
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(tensor);
  if (accumulator && (!accumulator->post_hooks().empty() || !accumulator->pre_hooks().empty())) {
    refuse(
        "has hooks on its gradient accumulator, which a sharded parameter does not have; after fully_shard, register them on "
        "the gradient accumulator of the shard, or register hooks on the parameter itself");
  }
}

}  // namespace

void expect_shardable(std::span<const ManagedParameter> managed) {
  for (const auto& parameter : managed) expect_shardable(parameter);
  expect_memory_of_its_own(managed);
}

at::Tensor dense(const ManagedParameter& parameter) {
  const auto& tensor = parameter.tensor;
  const auto plain =
      tensor.is_non_overlapping_and_dense() && !tensor.is_conj() && !tensor.is_neg() ? tensor : at::empty_like(tensor).copy_(tensor);
  if (!parameter.shard_dim) return plain;
  // The order in memory of the other dimensions is kept: empty_like gives a row the strides that it has in the tensor.
  const auto rows = plain.movedim(*parameter.shard_dim, 0);
  if (rows.numel() == 0 || rows.stride(0) * rows.size(0) == rows.numel()) return plain;
  std::vector<int64_t> strides(rows.sizes().size());
  const auto row = at::empty_like(rows[0]);
  strides[0] = row.numel();
  for (int64_t i = 0; i < row.dim(); i++) strides[static_cast<size_t>(i) + 1] = row.stride(i);
  return at::empty_strided(rows.sizes(), strides, rows.options()).copy_(rows).movedim(0, *parameter.shard_dim);
}

struct FormerMemory::Place {
  c10::Storage storage;
  std::vector<Extent> former, now;  // the places of parameters that an earlier call has sharded, and of the parameters of this call
};

FormerMemory::FormerMemory(std::span<const ManagedParameter> managed) {
  for (const auto& parameter : managed) {
    const auto* const storage = storage_of(parameter.tensor);
    auto place = std::ranges::find(places_, storage, [](const Place& known) { return known.storage.unsafeGetStorageImpl(); });
    if (place == places_.end()) {
      places_.push_back({.storage = parameter.tensor.storage(), .former = former_extents(storage), .now = {}});
      place = places_.end() - 1;
      if (!place->former.empty()) compat::unguard_storage(*place->storage.unsafeGetStorageImpl());
    }
    place->now.emplace_back(parameter.name, parameter.tensor);
  }
}

FormerMemory::~FormerMemory() {
  for (auto& [storage, extents, now] : places_) {
    if (abandoned_) extents.insert(extents.end(), now.begin(), now.end());
    if (storage.use_count() == 1 || extents.empty()) continue;
    compat::guard_storage(
        *storage.unsafeGetStorageImpl(),
        fmt::format("this tensor looks into the memory that parameter '{}' had before fully_shard (by a view, detach() or set_data), and "
                    "would see its old values for ever; make this tensor after fully_shard, or clone() it before",
                    extents.front().name));
    auto& [mutex, closed, sweep] = closed_memory();
    const std::lock_guard lock(mutex);
    closed.insert_or_assign(
        storage.unsafeGetStorageImpl(),
        Closed{.storage = c10::weak_intrusive_ptr<c10::StorageImpl>(storage.getWeakStorageImpl()), .extents = std::move(extents)});
  }
}

}  // namespace tessera
