// WriteGuard: the guard that all code takes before it changes shards (our optimizers, skipped steps, loading, full_params, other
// operators). The code holds it until the write has finished, except for operators that also read unsharded parameters.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <mutex>
#include <span>
#include <string_view>

#include "tessera/base/no_copy.h"
#include "tessera/shard/write_kind.h"

namespace tessera {

class Unit;

/// In shared memory other ranks read this rank's shards, so a write has to wait until they are done reading. Ranks may write units in
/// different orders: to avoid a deadlock, the guard declares all its units done reading before it waits for the first of them. It holds the
/// locks of their schedules until it is destroyed.
class WriteGuard : NoCopy {
 public:
  /// Throws UsageError if a unit is pinned (except with WriteKind::Unsharded) or swapped (except with Load and Skip), and TimeoutError or
  /// DeadlockError if waiting fails. The units must outlive the guard. `writer` describes the optimizer, so that ranks with different ones
  /// get an error at the next operation.
  WriteGuard(std::span<const std::shared_ptr<Unit>> units, WriteKind how, std::string_view writer = {});

  /// Outdates graphs that have saved the parameter of this shard: backward through them is an error. Takes a shard or a view of one.
  /// Call it before the first value changes.
  void outdate(const at::Tensor& shard) const;
  /// The same for all parameters of the units.
  void outdate_all() const;
  /// The part of the cast copy that belongs to `flat`, a flat tensor over a part of the shards, for the optimizer to write. Undefined if
  /// there is none, or if commit() makes it.
  at::Tensor cast_copy(const at::Tensor& flat) const;

  /// Ends the update: publishes the new version to other ranks at once, not only at this rank's next read.
  void commit() const;

 private:
  std::span<const std::shared_ptr<Unit>> units_;
  c10::SmallVector<std::unique_lock<std::recursive_mutex>, 4> locks_;
};

/// Throws UsageError if one of the units is pinned, as a WriteGuard for them would. Lets ranks agree on that before any of them takes a
/// guard.
void expect_writable(std::span<const std::shared_ptr<Unit>> units);

/// Marks whether the shards hold other values in place of the model's own (see optim::Average): writing the shards is an error meanwhile.
/// Loading the model removes the mark as well.
void set_swapped(std::span<const std::shared_ptr<Unit>> units, bool swapped);
/// Whether all units are still swapped.
bool are_swapped(std::span<const std::shared_ptr<Unit>> units);

/// Called when a raw pointer to shards of the unit is handed out, through which the program may write from now on. Waits like a write.
void hand_out_pointer(const std::shared_ptr<Unit>& unit);

}  // namespace tessera
