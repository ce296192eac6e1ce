// Orders computations that do not depend on each other's data. A compiler that sees a whole program merges equal computations, so it would
// keep values that the program computes again to save memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

namespace tessera {

/// Returns the same values, but none before all of `after` are computed, so that the compiler merges neither them nor their results with
/// earlier ones. On devices that compute operator by operator, returns the values themselves.
std::vector<at::Tensor> tied(std::vector<at::Tensor> values, std::span<const at::Tensor> after);

/// Whether tied() does anything with tensors of this device.
bool can_tie(c10::DeviceType device);

/// For a device's implementation. Both lists may have tensors of other devices.
using Tie = std::vector<at::Tensor> (*)(std::vector<at::Tensor> values, std::span<const at::Tensor> after);
void set_tie(c10::DeviceType device, Tie tie);

}  // namespace tessera
