// FlopCounter: counts the floating-point operations of matrix products, convolutions and attention.
#pragma once

#include <memory>

#include "tessera/base/no_copy.h"

namespace tessera {

/// While it lives, counts what operators of this thread compute, and of the backward passes that the thread starts. Operators that a segment
/// of activation checkpointing runs again do not count, so the result is that of the model and not of the run. Operators cost a few
/// microseconds more meanwhile: count one step, and assume that the others are like it.
class FlopCounter : NoCopy {
 public:
  FlopCounter();
  ~FlopCounter();
  double flops() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera
