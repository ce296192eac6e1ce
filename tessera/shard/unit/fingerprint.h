// Whether values are what they were, or the same on all ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera {

/// Of a flat tensor: a number that differs when any bit does, almost surely. By tensor operations, so that it works on any device.
uint64_t fingerprint(const at::Tensor& values);

}  // namespace tessera
