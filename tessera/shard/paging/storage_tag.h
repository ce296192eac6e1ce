// How an operator's operand is known to belong to a unit: a tag in its storage, found without a lock or a map.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>

#include "tessera/base/paging_key.h"

namespace tessera {

class Unit;

enum class Role {
  Unsharded,  // a whole parameter: its memory comes and goes
  Sharded,    // this rank's part of it
  Gradient,  // the gradient of that
};

/// Says which parameter's shard the values of a tensor were computed from, where its memory does not.
struct Origin final : c10::BackendMeta {
  Origin(const std::shared_ptr<Unit>& unit, size_t group, size_t parameter) : unit(unit), group(group), parameter(parameter) {}

  const std::weak_ptr<Unit> unit;
  const size_t group;
  const size_t parameter;  // in the group
};
using OriginPtr = c10::intrusive_ptr<Origin>;

/// Owned by the storage that it marks. Full parameters keep their unit alive; its own memory must not, or nothing would ever die.
struct StorageTag {
  Role role = Role::Unsharded;
  std::weak_ptr<Unit> unit;
  size_t group = 0;                     // of the unit
  std::shared_ptr<Unit> owner;          // Role::Unsharded only
  std::shared_ptr<at::DataPtr> memory;  // none while freed
  bool lent = false;                    // it is also somebody else's
  // Role::Gradient only: the sum of the squares of all values, as long as nobody changes one, and which gradients they are of: the sum of
  // their place_hash.
  std::optional<double> squares = {};
  uint64_t members = 0;
};

/// Nothing if the tensor's storage belongs to no unit.
StorageTag* tag_of(const at::Tensor& tensor);
StorageTag* tag_of(c10::StorageImpl& storage);

inline bool is_paged(const at::Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has(kPagingKey);
}

/// Tells the views of a storage apart.
inline uint64_t place_hash(const at::Tensor& view) {
  const auto place = static_cast<uint64_t>(view.storage_offset()) << 20 ^ static_cast<uint64_t>(view.numel());
  return (place + 1) * 0x9e3779b97f4a7c15ULL ^ place >> 7;
}

/// A marked storage of `bytes` on the device, without memory yet.
c10::Storage tagged_storage(Role role, const std::shared_ptr<Unit>& unit, size_t group, size_t bytes, c10::Device device);

/// Memory of the device, for one storage or for several in turn.
std::shared_ptr<at::DataPtr> allocate(size_t bytes, c10::Device device);

/// Gives a marked storage memory of its own, or what belongs to others, too; or takes it away: then whoever asks for it gets an exception,
/// with the words that explain() has given to the storage.
void fill(c10::StorageImpl& storage);
void lend(c10::StorageImpl& storage, std::shared_ptr<at::DataPtr> memory);
bool is_lent(const c10::StorageImpl& storage);
void drain(c10::StorageImpl& storage);
void explain(c10::StorageImpl& storage, std::string why_no_memory);

/// The memory stays where it is, but whoever asks for it gets the exception as well; and no more.
void close(c10::StorageImpl& storage);
void open(c10::StorageImpl& storage);

/// From now on, whoever asks for memory of shards to write there, past all operators, is taken for writing them: their unit waits until
/// nobody reads it. Not where libtorch does not tell of that.
void watch(c10::StorageImpl& shards);

/// The squares of a gradient's values, until somebody asks for its memory to write there. Nothing where libtorch does not tell of that.
void remember_squares(c10::StorageImpl& gradient, double squares);

/// A flat tensor over all of a storage, with a version counter of its own and without the key: for work below the surface.
at::Tensor flat_view(const c10::Storage& storage, at::ScalarType dtype);

/// The same over the memory alone: keeps that, while it moves, but neither the storage nor its unit.
at::Tensor memory_view(const c10::StorageImpl& storage, at::ScalarType dtype);

/// A tensor with the key over a part of a storage.
at::Tensor paged_view(const c10::Storage& storage, at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset);
/// Of a tensor that is none of ours: with the key.
at::Tensor paged_alias(const at::Tensor& tensor);
/// At the place that another has in a storage of the same device.
at::Tensor paged_view(const c10::Storage& storage, const at::Tensor& like);

}  // namespace tessera
