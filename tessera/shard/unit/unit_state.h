// The part of a unit that changes while a model trains. It is reached by unit.state(held), which takes the lock of the unit's schedule.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "tessera/shard/paging/casts.h"
#include "tessera/shard/unit/gradient_reduction.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/unit_memory.h"
#include "tessera/shard/unit/unit_rules.h"
#include "tessera/shard/unit/versions.h"

namespace tessera {

///      sharded  --unshard()-->  unsharding  --wait_for_unshard()-->  unsharded  --reshard()-->  sharded
///
/// With an integer reshard_after_forward, an unsharded unit becomes partly resharded first: reshard_after_forward() keeps a part of it,
/// from which a few ranks unshard it again among themselves.
class UnitState {
  // Declared before `versions` and `reduction`, which refer to them.
  Unit& unit_;
  const std::unique_ptr<UnitMemory> memory_;

 public:
  UnitState(Unit& unit, std::unique_ptr<UnitMemory> memory, UnitRules rules)
      : unit_(unit), memory_(std::move(memory)), rules(std::move(rules)) {}

  /// Whether the unit is unsharding or unsharded.
  bool has_memory() const { return state_ == State::Unsharding || state_ == State::Unsharded; }
  bool is_unsharded() const { return state_ == State::Unsharded; }
  /// Starts to unshard the unit if it is sharded.
  void unshard(const Fault& fault);
  /// Waits until the unit is unsharded. If this throws, the caller must reshard the unit.
  void wait_for_unshard();
  void reshard();
  /// Reshards as the unit's rule says, because this forward pass has used it for the last time.
  void reshard_after_forward();
  bool is_partly_resharded() const { return state_ == State::PartlyResharded; }
  /// The memory that the unit takes now beyond its shards.
  uint64_t held_bytes() const;

  /// Why the unit was unsharded before an operator needed it.
  enum class Early { No, Prefetched, AskedFor, Kept };
  void note_early(Early early) { early_ = early; }
  void keep_for_next_use() {
    if (has_memory()) early_ = Early::Kept;
  }
  /// Whether it stays unsharded until an operator has used it.
  bool waits_for_use() const { return early_ == Early::AskedFor || early_ == Early::Kept; }
  /// The gradients of this pass are complete. Whether passes use the unit even after that, as they do if it has frozen parameters whose
  /// layers come before all trained ones.
  void note_gradients(uint64_t pass) { gradients_in_ = pass; }
  void note_use(uint64_t pass) { used_after_gradients_ |= pass == gradients_in_; }
  bool is_used_after_gradients() const { return used_after_gradients_; }
  /// Lets operators write the unsharded parameters, which move into private memory of this rank and show there what the shards hold, also
  /// if the unit computes in another dtype. The unit must be unsharded and pinned until end_unsharded_writes(). May be called several
  /// times. Collective.
  void begin_unsharded_writes();
  void end_unsharded_writes() { unsharded_writers_--; }
  bool allows_unsharded_writes() const { return unsharded_writers_ > 0; }
  /// Whether the unsharded parameters lie in private memory, which may differ from the shards when it is no longer written.
  bool is_private() const { return is_private_; }
  /// Whether those of any unit of this process do.
  static bool some_are_private() { return private_ > 0; }
  /// While the shards hold values that are not the model's own, which come back later, writing them is an error: it would be lost.
  void lend() { lent_ = true; }
  void end_lending() { lent_ = false; }
  bool is_lent() const { return lent_; }
  /// Throws UsageError if the shards are lent.
  void expect_own_values() const;
  /// Copies this rank's part of the unsharded parameters into the shards. The unit must be unsharded.
  void keep_own_part();

  /// Throws UsageError if the ranks did not start with the same parameters. Compares only once; that call is collective over the world.
  void expect_equal_start();
  /// What a rank has to do before others can read a unit that this one does not use.
  void make_readable();
  /// Makes expect_equal_start() compare nothing, because all ranks have been given the same values since.
  void trust_start() { start_checked_ = true; }

  UnitMemory& memory() { return *memory_; }

  UnitRules rules;

  /// Activations that were cast to the unit's dtype; cleared when another unit is used or this one is resharded.
  Casts casts;
  Versions versions{unit_, *memory_};
  GradientReduction reduction{unit_, *memory_};

 private:
  bool converts(const Unit::Group& group) const;
  void show(const Unit::Group& group, at::ScalarType dtype) const;
  void show_stored(const Unit::Group& group) const;
  void keep_for_others(const Unit::Group& group);

  enum class State { Sharded, Unsharding, Unsharded, PartlyResharded } state_ = State::Sharded;
  Early early_ = Early::No;
  Works unsharding_;
  uint64_t gradients_in_ = 0;  // the number of the last pass that had gradients
  bool used_after_gradients_ = false;
  bool start_checked_ = false;
  int unsharded_writers_ = 0;
  bool is_private_ = false;
  std::vector<at::Tensor> read_elsewhere_;  // memory to which other guards have given pointers, while is_private_
  bool lent_ = false;
  static std::atomic<int> private_;  // how many units are so
};

}  // namespace tessera
