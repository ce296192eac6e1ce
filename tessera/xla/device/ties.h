// The order in which a compiler computes what no data orders.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "tessera/xla/graph/ops.h"

namespace tessera::xla {

/// Of these values and tensors, none is computed before all are there, and what is computed from them is not what was computed before.
/// Tensors of other devices stay as they are.
void put_behind_barrier(std::vector<Value>& values, std::span<at::Tensor> tensors);

/// What tessera::tied does on XLA devices.
std::vector<at::Tensor> tied_on_device(std::vector<at::Tensor> values, std::span<const at::Tensor> after);

}  // namespace tessera::xla
