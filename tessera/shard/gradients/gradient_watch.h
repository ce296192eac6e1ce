// What looks at the gradients of all units of a model, from one backward pass to the next.
#pragma once

#include <cstdint>

#include "tessera/shard/gradients/earlier_gradients.h"
#include "tessera/shard/gradients/equal_batches.h"
#include "tessera/shard/gradients/trained_beside.h"

namespace tessera {

struct GradientWatch {
  /// `world`: the ranks of the model.
  explicit GradientWatch(const Communicator& world) : equal_batches(world), beside(world) {}

  /// These know units by address.
  void forget(const Unit& unit) {
    equal_batches.forget(unit);
    earlier.forget(unit);
  }

  EqualBatches equal_batches;
  EarlierGradients earlier;
  TrainedBeside beside;
  uint64_t evaluations = 0;  // how many times passes without gradients have begun, however many batches each had
};

}  // namespace tessera
