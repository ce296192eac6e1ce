// WriteGuard: the guard that all code holds while it changes shards (Tessera's optimizers, skipped steps, loading, full_params, other
// operators). Only an operator that also reads unsharded parameters releases the guard before it writes.
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
/// different orders: to avoid a deadlock, the guard says of all its units that this rank is done reading them before it waits for the first
/// unit. It holds the locks of the units' schedules until it is destroyed.
class WriteGuard : NoCopy {
 public:
  /// Throws UsageError if a unit is pinned (except with WriteKind::Unsharded) or swapped (see set_swapped; except with Load and Skip), and
  /// TimeoutError or DeadlockError if waiting fails. The units must outlive the guard. `writer` describes the optimizer, so that ranks with
  /// different optimizers get an error at their next operation.
  WriteGuard(std::span<const std::shared_ptr<Unit>> units, WriteKind how, std::string_view writer = {});

  /// Makes backward an error for graphs that have saved the parameter of this shard. `shard` may also be a view of a shard. To be called
  /// before the first value changes.
  void outdate(const at::Tensor& shard) const;
  /// The same for all parameters of the units.
  void outdate_all() const;
  /// Returns the part of the cast copy (the copy of the shards in param_dtype that other ranks read) that belongs to `flat`, a flat tensor
  /// over a part of the shards. The optimizer writes it. Undefined if there is no cast copy, or if it is made when the new version is
  /// published.
  at::Tensor cast_copy(const at::Tensor& flat) const;

  /// Ends the update: publishes the new version to other ranks at once, not only at this rank's next read.
  void commit() const;

 private:
  std::span<const std::shared_ptr<Unit>> units_;
  c10::SmallVector<std::unique_lock<std::recursive_mutex>, 4> locks_;
};

/// Throws UsageError if one of the units is pinned, as the constructor of WriteGuard does. With it, ranks can agree on that error before
/// any of them takes a guard.
void expect_writable(std::span<const std::shared_ptr<Unit>> units);

/// Marks units as swapped, or removes the mark: the shards of a swapped unit hold other values than the model's own (see optim::Average),
/// and writing them is an error. Loading the model removes the mark as well.
void set_swapped(std::span<const std::shared_ptr<Unit>> units, bool swapped);
/// Whether all units are still swapped.
bool are_swapped(std::span<const std::shared_ptr<Unit>> units);

/// Called when the program gets a raw pointer to shards of the unit, through which it may write from now on. Waits for other ranks as a
/// write does.
void hand_out_pointer(const std::shared_ptr<Unit>& unit);

}  // namespace tessera
