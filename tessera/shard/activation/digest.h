// Digest: a number for the values of a tensor, to find out whether they are the same later on.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace tessera::activation {

/// Of large tensors only pieces are looked at, evenly spread. Nothing for a tensor whose memory can't be read here: that of a device or of
/// a unit.
std::optional<uint64_t> digest_of(const at::Tensor& tensor);

/// A hash of `hash` and one more number.
inline uint64_t mixed(uint64_t hash, uint64_t number) {
  hash = (hash ^ number) * 0x9e3779b97f4a7c15ULL;
  return hash ^ hash >> 29;
}

}  // namespace tessera::activation
