// What changes in a unit while a model trains. Whoever holds the lock of the unit's schedule reaches it by unit.state(held).
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
  Unit& unit_;
  const std::unique_ptr<UnitMemory> memory_;

 public:
  UnitState(Unit& unit, std::unique_ptr<UnitMemory> memory) : unit_(unit), memory_(std::move(memory)) {}

  /// Unsharding, or unsharded.
  bool has_memory() const { return state_ != State::Sharded; }
  bool is_unsharded() const { return state_ == State::Unsharded; }
  /// Where it fails, whoever waited for it reshards the unit.
  void unshard(const Fault& fault);
  void wait_for_unshard();
  void reshard();
  /// While unsharded: from now on in memory that no other rank sees.
  void make_private();
  /// While unsharded: takes this rank's part of the unsharded values into the shards.
  void keep_own_part();

  /// Before the first use: throws UsageError if the ranks did not begin with the same parameters. Collective over the world.
  void expect_equal_start();
  /// All ranks have been given the same values, so there is nothing to compare.
  void trust_start() { start_checked_ = true; }

  UnitMemory& memory() { return *memory_; }

  /// While positive, operators may write unsharded parameters (inside full_params).
  int unsharded_writers = 0;
  /// Operands in the dtype that the unit computes in, for as long as the unit is in use.
  Casts casts;
  Versions versions{unit_, *memory_};
  GradientReduction reduction{unit_, *memory_};

 private:
  enum class State { Sharded, Unsharding, Unsharded } state_ = State::Sharded;
  Works unsharding_;
  bool start_checked_ = false;
};

}  // namespace tessera
