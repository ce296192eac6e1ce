// Barriers, which order computations that do not depend on each other's results.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "tessera/xla/graph/ops.h"

namespace tessera::xla {

/// Replaces values and tensors by the results of one barrier: none is available before all are, and a compiler does not merge operations on
/// these results with equal operations on the values before the barrier. Tensors of other devices stay as they are.
void put_behind_barrier(std::vector<Value>& values, std::span<at::Tensor> tensors);

/// Implements tessera::tied for XLA devices.
std::vector<at::Tensor> tied_on_device(std::vector<at::Tensor> values, std::span<const at::Tensor> after);

}  // namespace tessera::xla
