// How the shards of a unit change, and when other ranks see it: the versions of its parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>

#include "tessera/shard/unit/unit_memory.h"
#include "tessera/shard/write_guard.h"

namespace tessera {

class Unit;

///      readable  --done_reading(), wait_to_write()-->  writable  --publish()-->  readable, one version on
///
/// A version is published once for all writes since the last one, because how many operators an optimizer takes may depend on the rank's
/// part. Ranks that leave a step out publish a version as well, so that all count alike.
class Versions {
 public:
  Versions(Unit& unit, UnitMemory& memory) : unit_(unit), memory_(memory) {}

  Subject subject() const;
  /// The version that the shards have, or will have when the unit is read next.
  uint64_t next_version() const { return version_ + (written_ ? 1 : 0); }

  /// This rank will not read the unit again before its shards change.
  void done_reading();
  /// Shards are about to change. Waits until no rank needs their present values.
  void wait_to_write(Write how);
  /// This rank leaves its shards as they are where others change theirs.
  void skip();
  /// Other ranks still read the values from before, so they can't see this rank's changes until it reads the unit again.
  bool is_late() const { return late_; }
  /// An operator of somebody else's step was about to write, and could not.
  bool write_broke_off() const { return write_broke_off_; }

  /// What other ranks read of a part of the shards (a flat tensor over it), if that is a cast copy which optimizers write along with the
  /// shards; else undefined.
  at::Tensor cast_copy(const at::Tensor& flat) const;

  /// Others may see the changes, if there are any.
  void publish();
  /// The same, and the first version too: before the unit is read.
  void publish(std::span<const Buffer> buffers);

  /// A raw pointer to the shards is handed out: what it changes later, without asking again, is found out by a fingerprint.
  void hand_out_pointer() { pointed_at_ = fingerprint_of_shards(); }
  /// Throws UsageError if shards have changed through a pointer that was handed out before they were read last.
  void expect_untouched();

  /// All ranks have given up what they did with the unit.
  void start_anew();

 private:
  void make_writable();
  void detach();
  uint64_t fingerprint_of_shards() const;

  Unit& unit_;
  UnitMemory& memory_;
  uint64_t version_ = 0;
  bool written_ = false;   // since the last publication
  bool writable_ = false;  // no other rank reads what would be written
  bool stale_ = true;      // what other ranks read has not been written along with the shards
  bool late_ = false;
  bool detached_ = false;  // the shards lie in memory that no other rank sees, for good
  bool write_broke_off_ = false;
  std::optional<uint64_t> pointed_at_;  // the shards' fingerprint at the last publication, if a raw pointer to them is out
};

}  // namespace tessera
