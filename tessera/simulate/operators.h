// Operators of a dry run: computes the shapes of their results, and how long they would take, but no values.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKey.h>

#include <map>
#include <string>

namespace tessera::simulate {

/// Lies below autograd. libtorch itself uses it nowhere. As long as a thread includes it, all operators of the thread on the CPU, and of
/// its backward passes, go through a function of this file.
inline constexpr auto kSimulationKey = c10::DispatchKey::Fake;

/// Makes libtorch call that function. Throws c10::Error if libtorch has a use of its own for the key.
void watch_operators();

/// Called for each of these operators before it runs. Set by FlopCounter.
inline void (*on_operator)(const c10::OperatorHandle& handle, const torch::jit::Stack& stack) = nullptr;

/// What a dry run does with its operators.
class OperatorCosts {
 public:
  virtual ~OperatorCosts() = default;
  /// An operator that reads and writes so many bytes, in this dtype. `handle` and `stack` are those of the call.
  virtual void add(const c10::OperatorHandle& handle, const torch::jit::Stack& stack, double bytes, at::ScalarType dtype) = 0;
  virtual void add_view() = 0;
};

/// From now on, the operators of this thread compute no values of large tensors. Small tensors have their values, because programs decide by
/// them.
void leave_out_values(OperatorCosts& costs);

/// The operators that had to compute the values of large tensors, because only these tell the shapes of their results, and how often.
const std::map<std::string, int>& computed_operators();

}  // namespace tessera::simulate
