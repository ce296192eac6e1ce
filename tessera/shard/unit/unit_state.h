// The part of a unit that changes while a model trains. It is reached by unit.state(held), which takes the lock of the unit's schedule.
#pragma once

#include <memory>
#include <utility>

#include "tessera/shard/paging/casts.h"
#include "tessera/shard/unit/gradient_reduction.h"
#include "tessera/shard/unit/unit_memory.h"
#include "tessera/shard/unit/versions.h"

namespace tessera {

class Unit;

///      sharded  --unshard()-->  unsharding  --wait_for_unshard()-->  unsharded  --reshard()-->  sharded
class UnitState {
  // Declared before `versions` and `reduction`, which refer to them.
  Unit& unit_;
  const std::unique_ptr<UnitMemory> memory_;

 public:
  UnitState(Unit& unit, std::unique_ptr<UnitMemory> memory) : unit_(unit), memory_(std::move(memory)) {}

  /// Whether the unit is unsharding or unsharded.
  bool has_memory() const { return state_ != State::Sharded; }
  bool is_unsharded() const { return state_ == State::Unsharded; }
  /// Starts to unshard the unit if it is sharded.
  void unshard(const Fault& fault);
  /// Waits until the unit is unsharded. If this throws, the caller must reshard the unit.
  void wait_for_unshard();
  void reshard();
  /// Lets operators write the unsharded parameters, which move into private memory of this rank. The unit must be unsharded and pinned
  /// until end_unsharded_writes(). May be called several times.
  void begin_unsharded_writes();
  void end_unsharded_writes() { unsharded_writers_--; }
  bool allows_unsharded_writes() const { return unsharded_writers_ > 0; }
  /// Copies this rank's part of the unsharded parameters into the shards. The unit must be unsharded.
  void keep_own_part();

  /// Throws UsageError if the ranks did not start with the same parameters. Compares only once; that call is collective over the world.
  void expect_equal_start();
  /// Makes expect_equal_start() compare nothing, because all ranks have been given the same values since.
  void trust_start() { start_checked_ = true; }

  UnitMemory& memory() { return *memory_; }

  /// Activations that were cast to the unit's dtype; cleared when another unit is used or this one is resharded.
  Casts casts;
  Versions versions{unit_, *memory_};
  GradientReduction reduction{unit_, *memory_};

 private:
  enum class State { Sharded, Unsharding, Unsharded } state_ = State::Sharded;
  Works unsharding_;
  bool start_checked_ = false;
  int unsharded_writers_ = 0;
};

}  // namespace tessera
