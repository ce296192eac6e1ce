// The one way to write shards: our optimizers, skipped steps, loading, full_params, and operators of anybody else all take it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <mutex>
#include <span>

namespace tessera {

class Unit;

/// What is done to the shards.
enum class Write {
  Operators,  // somebody's operators change them, and nobody knows when they are through: others see the changes at the next read
  Update,     // an optimizer changes them and the cast copies, and calls publish()
  Skip,       // they stay as they are where other ranks take a step
  Load,       // every value is replaced, by the same values on all ranks
  Unsharded,  // they take over what was written to unsharded parameters, which the caller has pinned
};

/// A write of other ranks' data must wait until nobody reads it, and ranks may write units in different orders. So a guard says of all its
/// units that this rank is done reading before it waits for the first. Then it holds the locks of their models until it ends.
class WriteGuard {
 public:
  /// Throws UsageError where a unit is in use unsharded, and what waiting may throw. The units must outlive the guard.
  WriteGuard(std::span<const std::shared_ptr<Unit>> units, Write how);
  WriteGuard(const WriteGuard&) = delete;
  WriteGuard& operator=(const WriteGuard&) = delete;
  ~WriteGuard() = default;

  /// Before the first value changes: graphs that have saved the parameter of this shard, or of a view of it, are stale.
  void outdate(const at::Tensor& shard) const;
  /// Of all parameters.
  void outdate_all() const;
  /// What other ranks read of a part of the shards (a flat tensor over it), if that is a cast copy to be written along; else undefined.
  at::Tensor cast_copy(const at::Tensor& flat) const;

  /// All is written: other ranks may see it now, before this rank reads the units again.
  void publish() const;

 private:
  std::span<const std::shared_ptr<Unit>> units_;
  c10::SmallVector<std::unique_lock<std::recursive_mutex>, 4> locks_;
};

/// A raw pointer to shards of the unit is handed out, through which anybody may write from now on.
void hand_out_pointer(const std::shared_ptr<Unit>& unit);

}  // namespace tessera
