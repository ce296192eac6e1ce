// A checksum of tensor values: shows whether they have changed, or differ between ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace tessera {

/// Returns a hash of the bits of a flat tensor, as fast as memory can be read. Values on a device are copied to the host.
uint64_t fingerprint(const at::Tensor& values);
/// The same for bytes in host memory.
uint64_t fingerprint(std::span<const std::byte> bytes);

}  // namespace tessera
