// The part of a unit that changes while a model trains. Accessed by unit.state(held), where `held` is the lock of the unit's schedule.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <optional>
#include <vector>

#include "tessera/base/event.h"
#include "tessera/base/no_copy.h"
#include "tessera/base/weak_tensor.h"
#include "tessera/shard/gradients/gradient_reduction.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/versions.h"

namespace tessera {

/// Casts activations to the dtype of a unit's parameters. An activation that meets several parameters of the unit is cast once.
class Casts {
 public:
  at::Tensor cast(const at::Tensor& operand, at::ScalarType dtype);
  void clear() { known_.clear(); }

 private:
  struct Cast {
    WeakTensor operand;
    uint32_t version;
    WeakTensor result;  // weak, because its graph may own the unit
  };
  std::vector<Cast> known_;
};

/// A unit is in one of four states. From each of them, reshard() leads to `sharded`.
///
///      sharded  --unshard()-->  unsharding  --wait_for_unshard()-->  unsharded  --reshard()-->  sharded
///                                   ^                                    |
///                                   |                        reshard_after_forward()
///                                   |                                    v
///                                   +-----------unshard()-------  partly resharded
///
/// Partly resharded exists only with an integer reshard_after_forward: a few ranks together keep the whole unit, and all-gather it among
/// themselves.
class UnitState : NoCopy {
  Unit& unit_;  // declared before the members that refer to it

 public:
  explicit UnitState(Unit& unit) : unit_(unit) {}

  /// Whether the unit is unsharding or unsharded.
  bool has_memory() const { return state_ == State::Unsharding || state_ == State::Unsharded; }
  bool is_unsharded() const { return state_ == State::Unsharded; }
  /// Starts to unshard the unit if it is sharded.
  void unshard(std::span<at::Tensor> operands);
  /// Waits until the unit is unsharded. If this throws, the caller must reshard the unit.
  void wait_for_unshard();
  void reshard();
  /// Orders work that the caller queues next on its current stream: it runs after the unit is whole and before the unit's memory is reused.
  /// The unit must be unsharded.
  void note_stream();
  /// Reshards the unit as its reshard_after_forward says. Called when this forward pass has used the unit for the last time.
  void reshard_after_forward();
  bool is_partly_resharded() const { return state_ == State::PartlyResharded; }
  /// The memory that the unit takes now beyond its shards.
  uint64_t held_bytes() const { return held_bytes_; }
  /// Sets reshard_after_forward. Throws UsageError if the shard group can't be divided as the rule says. The unit must not be partly
  /// resharded. Collective.
  void set_reshard_after_forward(ReshardAfterForward rule);
  /// Whether the unit stays unsharded between forward and backward.
  bool stays_after_forward() const { return settings.reshard_after_forward.keeps(is_root); }

  /// Why the unit was unsharded before an operator needed it.
  enum class Early { No, Prefetched, AskedFor, Kept };
  void note_early(Early early) { early_ = early; }
  void keep_for_next_use() {
    if (has_memory()) early_ = Early::Kept;
  }
  /// Whether the unit stays unsharded until an operator has used it.
  bool waits_for_use() const { return early_ == Early::AskedFor || early_ == Early::Kept; }
  /// note_gradients() notes that the unit's gradients are complete in a pass, and note_use() each use of the unit. A use after the
  /// gradients, in the same pass, occurs if the unit has frozen parameters whose layers come before all trained layers.
  void note_gradients(uint64_t pass) { gradients_in_ = pass; }
  void note_use(uint64_t pass) { used_after_gradients_ |= pass == gradients_in_; }
  bool is_used_after_gradients() const { return used_after_gradients_; }

  /// All-gathers `own_flat`, which has the layout of this rank's chunk, into new memory, for copies of parameters, gradients or optimizer
  /// state. Collective.
  at::Tensor gathered(const Unit::Group& group, const at::Tensor& own_flat);
  /// Gives the unsharded parameters the stored form: values and dtype of the shards, even if the unit computes in another dtype. The unit
  /// must be unsharded and pinned, and stays so. May be called several times. Collective.
  void show_stored();
  /// Calls show_stored() and moves the unsharded parameters to memory of this rank alone, where operators may write them until
  /// end_unsharded_writes().
  void begin_unsharded_writes();
  void end_unsharded_writes() { unsharded_writers_--; }
  bool allows_unsharded_writes() const { return unsharded_writers_ > 0; }
  /// Whether the unsharded parameters of any unit of this process show the stored form.
  static bool some_show_stored() { return showing_stored_ > 0; }
  /// Whether the shards temporarily hold other values than the model's own (a moving average). A write to the shards would be lost when the
  /// model's own values are restored.
  bool is_swapped = false;
  /// Throws UsageError if is_swapped.
  void expect_own_values() const;
  /// Copies this rank's part of the unsharded parameters into the shards. The unit must be unsharded.
  void keep_own_part();

  /// Throws UsageError if the ranks did not start with the same parameters. Compares only once; that call is collective over the world.
  void expect_equal_start();
  /// Makes this rank's shards readable for other ranks, although this rank does not use the unit.
  void make_readable();
  /// Makes expect_equal_start() compare nothing, because all ranks have been given the same values since.
  void trust_start() { start_checked_ = true; }

  UnitSettings settings = {};
  /// Whether this is the root of its model: the unit of the outermost module. A model has no root if inner units have taken all parameters.
  bool is_root = false;
  /// Activations that were cast to the unit's dtype; cleared when another unit is used or this unit is resharded.
  Casts casts;
  Versions versions{unit_};
  GradientReduction reduction{unit_, settings, versions};
  /// The function of this name in backward/unit_node.h, which this layer may not include.
  void (*reduce_unsynced)(Unit& unit) = nullptr;

 private:
  void gather(const at::Tensor& own, const at::Tensor& whole) const;
  void show(const Unit::Group& group, at::ScalarType dtype) const;
  void keep_for_others(const Unit::Group& group);
  void release_memory();

  enum class State { Sharded, Unsharding, Unsharded, PartlyResharded } state_ = State::Sharded;
  Early early_ = Early::No;
  Works unsharding_;
  Event whole_;                         // recorded on the stream that was current when the unit became whole
  c10::SmallVector<Event, 1> streams_;  // recorded on other streams that have used the unit since
  Work published_;                      // done when all ranks have published the version that this rank unshards
  std::optional<KeptPart> kept_;
  uint64_t held_bytes_ = 0;    // known even when the modules are gone
  uint64_t gradients_in_ = 0;  // the number of the last pass that had gradients
  bool used_after_gradients_ = false;
  bool start_checked_ = false;
  int unsharded_writers_ = 0;
  std::vector<at::Tensor> read_elsewhere_;  // memory to which other guards have given pointers, while the stored form is shown
  static std::atomic<int> showing_stored_;  // how many units show the stored form
};

/// Throws UsageError if `ranks` ranks can't be divided as the rule says.
void expect_divisor(ReshardAfterForward rule, int ranks);

}  // namespace tessera
