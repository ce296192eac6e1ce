// Constants and helpers that readers and writers of GGUF files share.
#pragma once

#include <bit>
#include <cstdint>

#include "tessera/checkpoint/formats/gguf/gguf.h"

namespace tessera::checkpoint {

static_assert(std::endian::native == std::endian::little, "GGUF files are little-endian, and Tessera copies their bytes as they are");
inline constexpr char kGgufMagic[] = {'G', 'G', 'U', 'F'};
inline constexpr uint32_t kGgufVersion = 3, kOldestGgufVersion = 2;  // versions 2 and 3 differ only on big-endian machines
inline constexpr uint64_t kGgufAlignment = 32;

inline uint64_t aligned(uint64_t offset, uint64_t alignment) {
  return (offset + alignment - 1) / alignment * alignment;
}

/// Calls `act` with a zero of the C++ type of the numbers that `type` names.
inline void with_number(GgufType type, const auto& act) {
  using enum GgufType;
  switch (type) {
    case U8:
    case Bool:
      return act(uint8_t());
    case I8:
      return act(int8_t());
    case U16:
      return act(uint16_t());
    case I16:
      return act(int16_t());
    case U32:
      return act(uint32_t());
    case I32:
      return act(int32_t());
    case F32:
      return act(float());
    case U64:
      return act(uint64_t());
    case I64:
      return act(int64_t());
    default:
      return act(double());
  }
}

}  // namespace tessera::checkpoint
