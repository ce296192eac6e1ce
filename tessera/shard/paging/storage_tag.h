// How an operator's operand is known to belong to a unit: a tag in its storage, found without a lock or a map.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>

namespace tessera {

class Unit;

enum class Role {
  Unsharded,  // unsharded parameters: the memory comes and goes
  Sharded,    // this rank's shards
  Gradient,   // the gradients of the shards
};

struct StorageTag {
  Role role = Role::Unsharded;
  std::weak_ptr<Unit> unit;
  size_t group = 0;             // of the unit
  std::shared_ptr<Unit> owner;  // Role::Unsharded only: a unit lives as long as its unsharded parameters
  // Role::Gradient only. The sum of the squares of all values, as long as nobody changes one, and which gradients it is of: the sum of
  // their place_hash.
  std::optional<double> squares = {};
  uint64_t members = 0;
};

/// Memory that one storage or several in turn may have.
using MemoryPtr = std::shared_ptr<at::DataPtr>;
MemoryPtr allocate_memory(size_t bytes, c10::Device device);

/// A storage of a unit. Whoever asks for its memory while it has none gets an exception.
///
/// The tag lies beside the pointer to the memory, not in it: others may ask whose storage this is while the memory comes or goes.
class TaggedStorage final : public c10::StorageImpl {
 public:
  /// Without memory.
  TaggedStorage(StorageTag tag, size_t bytes, c10::Device device);

  /// Gives it new memory of its own.
  void allocate();
  /// Gives it memory that has other users, too.
  void attach(MemoryPtr memory);
  bool owns_memory() const { return memory_ != nullptr && owns_memory_; }
  /// Takes the memory away. On a device, memory of its own is reused only after the work that is queued now.
  void release();

  /// The memory stays, but whoever asks for it gets the exception as well, until unguard().
  void guard();
  void unguard();
  /// What that exception says.
  void explain(std::string why_no_memory);

  /// From now on, whoever asks for memory of shards to write there, past all operators, is taken for writing them: their unit waits until
  /// nobody reads it. Not where libtorch does not tell of that.
  void watch_raw_writes();
  /// The squares of a gradient's values, until somebody asks for its memory to write there. Nothing where libtorch does not tell of that.
  void remember_squares(double squares);

  /// A flat tensor over the memory alone: it keeps the memory, but neither the storage nor its unit.
  at::Tensor memory_view(at::ScalarType dtype) const;

  void release_resources() override;

  StorageTag tag;

 private:
  void show_memory();

  MemoryPtr memory_;
  bool owns_memory_ = false;
};
using TaggedStoragePtr = c10::intrusive_ptr<TaggedStorage>;

/// Nothing if the tensor's storage belongs to no unit.
TaggedStorage* tagged_storage(const at::Tensor& tensor);
StorageTag* tag_of(const at::Tensor& tensor);

}  // namespace tessera
