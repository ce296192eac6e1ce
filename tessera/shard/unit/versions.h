// Versions of a unit's parameters: when a rank may change its shards, and when other ranks see the change.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "tessera/shard/unit/unit.h"
#include "tessera/shard/write_kind.h"

namespace tessera {

///      readable  --done_reading(), wait_to_write()-->  writable  --publish()-->  readable, in the next version
///
/// All writes between two publications make one version, because the number of operators that an optimizer runs may depend on the rank's
/// part. A rank that skips a step publishes a version as well, so that all ranks count alike.
class Versions {
 public:
  explicit Versions(Unit& unit) : unit_(unit) {}

  Subject subject() const;
  /// The version that the shards have now or, after a write, will have when they are published.
  uint64_t next_version() const { return version_ + (written_ ? 1 : 0); }

  /// Tells the other ranks that this rank will not read the current version again.
  void done_reading();
  /// Waits until all ranks are done reading the current version. To be called before shards change.
  void wait_to_write(WriteKind how);
  /// Counts a version without a change, because this rank skips a step that other ranks take.
  void skip();
  /// Sets a text that describes the writer of the next change, for ranks to compare: an optimizer of Tessera with its options, or other
  /// operators.
  void set_writer(WriteKind how, std::string_view writer);
  /// Whether other ranks may still read the version before this rank's write. If so, the new version is published not at the end of the
  /// update, but only when this rank reads the unit next.
  bool publishes_later() const { return publishes_later_; }
  /// Whether an operator was about to write the shards, but waiting for other ranks failed. An optimizer that is not one of Tessera's may
  /// have changed its state already.
  bool write_broke_off() const { return write_broke_off_; }

  /// Returns the part of the cast copy (the copy of the shards in param_dtype that other ranks read) that belongs to `flat`, a flat tensor
  /// over a part of the shards. The optimizer writes it. Undefined if there is no cast copy, or if publish() makes it.
  at::Tensor cast_copy(const at::Tensor& flat) const;

  /// Publishes a new version if the shards were written.
  void publish();
  /// Called before the unit is read: publishes a new version if the shards were written, or the first version if none was published yet.
  void publish(std::span<const Buffer> buffers);

  /// To be called when a raw pointer to the shards is handed out. Writes through it can't be seen, so expect_untouched() compares
  /// fingerprints.
  void hand_out_pointer() { pointed_at_ = fingerprint_of_shards(); }
  /// Throws UsageError if the shards have changed through a raw pointer that was requested before they were last published.
  void expect_untouched();

  /// Abandons a write or read in progress. All ranks call it, inside tessera::recover.
  void reset();

 private:
  Turns& turns() const { return *unit_.memory().turns; }
  void make_writable();
  bool all_casts_by_optimizers() const;
  uint64_t fingerprint_of_shards() const;

  Unit& unit_;
  uint64_t version_ = 0;
  std::string writer_;
  bool written_ = false;          // the shards were written since the last publication
  bool writable_ = false;         // no other rank reads the memory that a write would change
  bool must_copy_ = true;         // publish() has to make the copy that other ranks read, because it was not written along with the shards
  bool publishes_later_ = false;  // see publishes_later()
  bool detached_ = false;         // the shards have moved into private memory for good
  bool write_broke_off_ = false;
  std::optional<uint64_t> pointed_at_;  // the shards' fingerprint at the last publication, if a raw pointer to them was handed out
};

}  // namespace tessera
