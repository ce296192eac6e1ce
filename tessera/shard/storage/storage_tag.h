// The storages of a unit, and the tag of each storage: the unit and group to which its memory belongs. Finding the tag of an operator's
// operand takes no lock and no map.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <typeinfo>

namespace tessera {

class Unit;

enum class Role {
  Unsharded,  // unsharded parameters; has memory only while the unit is not sharded
  Sharded,    // this rank's shards
  Gradient,   // the gradients of the shards
};

struct StorageTag {
  Role role = Role::Unsharded;
  std::weak_ptr<Unit> unit;
  size_t group = 0;             // index in the unit
  std::shared_ptr<Unit> owner;  // Role::Unsharded only: the unsharded parameters own the unit
  // Role::Gradient only. `squares`: the sum of squares of all values; unset once a value may have changed. `members`: the sum of the
  // place_hash of all gradients that `squares` covers.
  std::optional<double> squares = {};
  uint64_t members = 0;
};

/// Memory that several storages may use, at once or in turn.
using MemoryPtr = std::shared_ptr<at::DataPtr>;
/// Throws IoError if a device has no room; the message names the unit, and says how many bytes of units are unsharded.
MemoryPtr allocate_memory(size_t bytes, c10::Device device, std::string_view unit);

/// Frees released device memory whose queued readers have finished. Until then such memory is kept, unless work that is queued after these
/// readers reuses it. Returns how many pieces of memory are still kept.
size_t free_retired();

/// A storage of a unit. A request for its data pointer throws while it has no memory.
///
/// The tag is a member of the storage and not in the context of its data pointer, so that other threads may read it while memory is
/// attached or released.
class TaggedStorage final : public c10::StorageImpl {
 public:
  /// The new storage has no memory.
  TaggedStorage(StorageTag tag, size_t bytes, c10::Device device);

  /// Allocates memory that only this storage uses, like allocate_memory.
  void allocate(std::string_view unit);
  /// Drops the memory, and sets the size of the memory that the storage gets next.
  void resize(size_t bytes);
  /// Attaches memory that only this storage uses.
  void adopt(MemoryPtr memory);
  /// Attaches memory that may have other users.
  void attach(MemoryPtr memory);
  bool owns_memory() const { return memory_ != nullptr && owns_memory_; }
  /// Drops the memory. Memory that only this storage uses is reused only after the work that is queued on the device so far.
  void release();

  /// Keeps the memory, but makes requests for the data pointer throw until unguard() is called.
  void guard();
  void unguard();
  /// Sets the message of the exception that requests for the data pointer throw.
  void explain(std::string why_no_memory);

  /// Makes requests for a writable data pointer outside of operators count as writes to the shards: `on_raw_write` is called. Has no effect
  /// with versions of libtorch that don't report such requests (compat::kTellsOfWrites).
  void watch_raw_writes();
  /// Called for a request that watch_raw_writes() watches. Set by install_paging(), because this layer can't wait for other ranks.
  static void (*on_raw_write)(const std::shared_ptr<Unit>& unit);
  /// Stores the sum of squares of a gradient in the tag until a writable data pointer is requested. Stores nothing with versions of
  /// libtorch that don't report such requests.
  void remember_squares(double squares);

  /// A flat tensor over the memory. It keeps the memory alive, but neither this storage nor the unit.
  at::Tensor memory_view(at::ScalarType dtype) const;

  void release_resources() override;

  StorageTag tag;

 private:
  void show_memory();

  MemoryPtr memory_;
  bool owns_memory_ = false;
};
using TaggedStoragePtr = c10::intrusive_ptr<TaggedStorage>;

/// The storage of a tensor. Null if the tensor has none, such as a sparse tensor.
inline c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}
/// The storage of a tensor if it is exactly of this class, else null.
template <class Storage>
Storage* storage_as(const at::Tensor& tensor) {
  auto* const storage = storage_of(tensor);
  return storage != nullptr && typeid(*storage) == typeid(Storage) ? static_cast<Storage*>(storage) : nullptr;
}

/// tagged_storage() and tag_of() return null if the tensor's storage belongs to no unit.
inline TaggedStorage* tagged_storage(const at::Tensor& tensor) {
  return storage_as<TaggedStorage>(tensor);
}
inline StorageTag* tag_of(const at::Tensor& tensor) {
  auto* const storage = tagged_storage(tensor);
  return storage == nullptr ? nullptr : &storage->tag;
}
/// The unit to whose memory the tensor belongs. Null if there is none, or if it is gone.
inline std::shared_ptr<Unit> unit_of(const at::Tensor& tensor) {
  const auto* const tag = tag_of(tensor);
  return tag == nullptr ? nullptr : tag->unit.lock();
}

}  // namespace tessera
