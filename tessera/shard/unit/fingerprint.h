// A checksum of tensor values: shows whether they have changed, or differ between ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera {

/// A hash of the bits of a flat tensor, on any device. Those of different devices can't be compared.
uint64_t fingerprint(const at::Tensor& values);

}  // namespace tessera
