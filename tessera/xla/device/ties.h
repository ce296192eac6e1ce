// Barriers, which order computations that no data orders.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "tessera/xla/graph/ops.h"

namespace tessera::xla {

/// Puts values and tensors behind one barrier: none is available before all are, and a compiler does not merge what is computed from them
/// with what was computed before. Tensors of other devices stay as they are.
void put_behind_barrier(std::vector<Value>& values, std::span<at::Tensor> tensors);

/// tessera::tied on XLA devices.
std::vector<at::Tensor> tied_on_device(std::vector<at::Tensor> values, std::span<const at::Tensor> after);

}  // namespace tessera::xla
