// Counts floating-point operations: of matrix products, convolutions and attention.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>
#include <optional>

#include "tessera/base/no_copy.h"

namespace tessera::simulate {

/// The work of an operator that counts.
struct Product {
  double flops = 0;
  double smallest_side = 0;  // of the matrices
  bool is_convolution = false;
};
/// `stack` ends with the arguments of the operator.
std::optional<Product> product_of(const c10::OperatorHandle& handle, const torch::jit::Stack& stack);

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

/// While it lives, nothing that this thread computes counts.
class Uncounted : NoCopy {
 public:
  Uncounted() { depth_++; }
  ~Uncounted() { depth_--; }
  static bool applies() { return depth_ > 0; }

 private:
  inline static thread_local int depth_ = 0;
};

}  // namespace tessera::simulate
