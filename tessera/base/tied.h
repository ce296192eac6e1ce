// Orders computations that do not depend on each other's data. A compiler that sees a whole program merges equal computations: it would
// keep values in memory that the program drops and computes again, as activation checkpointing does.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

namespace tessera {

/// Returns the same values, but only once all of `after` are computed, so that the compiler can't merge what is computed from the returned
/// values with equal earlier computations. On devices that compute operator by operator, returns the values themselves.
std::vector<at::Tensor> tied(std::vector<at::Tensor> values, std::span<const at::Tensor> after);

/// Whether tied() does anything with tensors of this device.
bool can_tie(c10::DeviceType device);

/// The implementation of tied() for a device. Both lists may have tensors of other devices.
using Tie = std::vector<at::Tensor> (*)(std::vector<at::Tensor> values, std::span<const at::Tensor> after);
void set_tie(c10::DeviceType device, Tie tie);

}  // namespace tessera
