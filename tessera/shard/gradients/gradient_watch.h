// GradientWatch: checks of the gradients of all units of a model that span several backward passes.
#pragma once

#include <cstdint>

#include "tessera/shard/gradients/earlier_gradients.h"
#include "tessera/shard/gradients/equal_batches.h"
#include "tessera/shard/gradients/trained_beside.h"

namespace tessera {

struct GradientWatch {
  /// `world`: the ranks of the model.
  explicit GradientWatch(const Communicator& world) : equal_batches(world), beside(world) {}

  /// To be called when a unit leaves the model, because units are known by address.
  void forget(const Unit& unit) {
    equal_batches.forget(unit);
    earlier.forget(unit);
  }

  EqualBatches equal_batches;
  EarlierGradients earlier;
  TrainedBeside beside;
  uint64_t evaluations = 0;  // how many runs of passes without gradients have begun, however many batches each had
};

}  // namespace tessera
