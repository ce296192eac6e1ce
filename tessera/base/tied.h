// Order that no data tells. A compiler that sees a whole program computes equal things once, and each of them when it likes: what is computed
// again to save memory would be kept instead.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

namespace tessera {

/// The same values, none of which is there before all of `after` are, so that they and what is computed from them are not those from before.
/// On devices that compute operator by operator, these are the values themselves.
std::vector<at::Tensor> tied(std::vector<at::Tensor> values, std::span<const at::Tensor> after);

/// Whether tied() does anything with tensors of this device.
bool can_tie(c10::DeviceType device);

/// For a device's implementation. Both lists may have tensors of other devices.
using Tie = std::vector<at::Tensor> (*)(std::vector<at::Tensor> values, std::span<const at::Tensor> after);
void set_tie(c10::DeviceType device, Tie tie);

}  // namespace tessera
