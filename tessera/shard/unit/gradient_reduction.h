// How the gradients of a unit become their mean over all ranks: packed, then reduced while other work goes on, then finished.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstdint>
#include <span>
#include <string_view>

#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/unit_memory.h"

namespace tessera {

class GradientReduction {
 public:
  GradientReduction(Unit& unit, UnitMemory& memory) : unit_(unit), memory_(memory) {}

  /// The gradients of one backward pass, before they travel. Whoever has it is the only one that packs.
  class Packing {
   public:
    /// Gradients of a group go to their places; what has none becomes zeros.
    void pack(size_t group, std::span<Unit::Parameter* const> parameters, std::span<const at::Tensor> gradients);
    /// Sends them on their way; this rank's part of the mean goes to the groups' gradient memory. The others must pack the same: `name` is
    /// what errors call it, `members` a hash over the parameters that have a gradient.
    void start(std::string_view name, uint64_t members);

   private:
    friend class GradientReduction;
    Packing(GradientReduction& reduction, std::span<Unit::Group* const> groups);

    GradientReduction& reduction_;
    c10::SmallVector<Unit::Group*, 2> groups_;
    GradientBuffers buffers_;
  };
  /// Of an earlier pass, the reduction is finished first.
  Packing begin(std::span<Unit::Group* const> groups);

  /// Returns when this rank's part of the mean is there.
  void finish();
  void abandon();
  /// Gradients are not there yet. Without the lock.
  bool in_flight() const { return in_flight_; }

  /// Somebody asks for norms: from now on reductions compute the squares of what they add up as well. Without the lock.
  void expect_norms() { wants_squares_ = true; }

 private:
  void make_memory(Unit::Group& group);

  Unit& unit_;
  UnitMemory& memory_;
  Works works_;
  c10::SmallVector<GradientMemory, 2> reduced_;  // by them
  std::atomic<bool> in_flight_ = false;
  std::atomic<bool> wants_squares_ = false;
};

}  // namespace tessera
