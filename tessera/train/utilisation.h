// Utilisation: which part of the floating-point operations that the ranks could do a run does for its model (model FLOPs utilisation, MFU).
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>

#include "tessera/base/no_copy.h"
#include "tessera/comm/communicator.h"
#include "tessera/simulate/flops.h"
#include "tessera/train/value.h"

namespace tessera::train {

/// Counts the operations of one step, the second one of a run, and assumes that the others are like it. The peak of each rank is
/// TESSERA_PEAK_FLOPS or, unless that is set, the speed of a matrix product while all ranks compute. Tells nothing on XLA devices and
/// simulated worlds.
class Utilisation : NoCopy {
 public:
  /// `dtype` is that of the model's products.
  Utilisation(const Communicator& world, at::ScalarType dtype);

  /// Called before the first batch of a step.
  void step_begins();
  /// Called after the last batch of a step, with how many batches the step had. Returns whether the time of this step is that of no other,
  /// because operations were counted. Collective.
  bool step_ended(int64_t batches);
  /// Forgets a step that has begun, because the program has left it.
  void step_is_left() { counter_.reset(); }

  /// {"mfu", 0.41, Unit::Part}, as soon as it is known.
  std::optional<Value> at(double batches_per_second) const;

 private:
  const Communicator world_;
  const at::ScalarType dtype_;
  std::optional<double> own_peak_;  // operations per second of this rank
  std::optional<simulate::FlopCounter> counter_;
  bool is_first_ = true, is_done_;
  double utilisation_of_batch_ = 0;  // if each took a second
};

}  // namespace tessera::train
