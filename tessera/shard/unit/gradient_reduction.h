// Turns the gradients of a unit into their mean over all ranks: they are packed, reduced while backward continues, and finished later.
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

  /// Packs the gradients of one backward pass. While it exists, no other thread can pack.
  class Packing {
   public:
    /// Copies the gradients of a group to their places in the buffer. Parameters without a gradient get zeros.
    void pack(size_t group, std::span<Unit::Parameter* const> parameters, std::span<const at::Tensor> gradients);
    /// Starts the reduction, which writes this rank's part of the mean to the groups' gradient memory. Errors call the unit `name`.
    /// `members` is a hash over the parameters that have a gradient; ranks that differ in it get an error.
    void start(std::string_view name, uint64_t members);

   private:
    friend class GradientReduction;
    Packing(GradientReduction& reduction, std::span<Unit::Group* const> groups);

    GradientReduction& reduction_;
    c10::SmallVector<Unit::Group*, 2> groups_;
    GradientBuffers buffers_;
  };
  /// Begins to pack. Finishes the reduction of an earlier pass first.
  Packing begin(std::span<Unit::Group* const> groups);

  /// Waits until this rank's part of the mean is complete.
  void finish();
  /// Drops a reduction that has not finished.
  void abandon();
  /// Whether a reduction has started and not finished. Needs no lock.
  bool in_flight() const { return in_flight_; }

  /// From now on reductions also compute the sum of squares of their results, because a norm of the gradients was requested. Needs no lock.
  void expect_norms() { wants_squares_ = true; }

 private:
  void make_memory(Unit::Group& group);

  Unit& unit_;
  UnitMemory& memory_;
  Works works_;
  c10::SmallVector<GradientMemory, 2> reduced_;  // where works_ write their results
  std::atomic<bool> in_flight_ = false;
  std::atomic<bool> wants_squares_ = false;
};

}  // namespace tessera
