// Numbers and a hash of bits that are the same on every processor, for tests of kernels.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace tessera::testing {

/// Floats from -1 to 1, each of them exact.
inline std::vector<float> fixed_floats(size_t count, uint32_t seed) {
  std::vector<float> result(count);
  for (auto& value : result) {
    seed = seed * 1664525 + 1013904223;
    value = static_cast<float>(static_cast<int32_t>(seed) >> 8) * 0x1p-23F;
  }
  return result;
}

/// The upper halves of fixed_floats(), which are bfloat16.
inline std::vector<uint16_t> fixed_bfloats(size_t count, uint32_t seed) {
  std::vector<uint16_t> result;
  for (const float value : fixed_floats(count, seed)) {
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    result.push_back(static_cast<uint16_t>(bits >> 16));
  }
  return result;
}

inline std::vector<uint8_t> fixed_bytes(size_t count, uint32_t seed) {
  std::vector<uint8_t> result;
  for (const float value : fixed_floats(count, seed)) result.push_back(static_cast<uint8_t>((value + 1) * 128));
  return result;
}

/// FNV-1a over the bytes of all that is added.
class BitHash {
 public:
  template <class T>
  BitHash& add(std::span<const T> values) {
    for (const auto byte : std::as_bytes(values)) value_ = (value_ ^ std::to_integer<uint64_t>(byte)) * 0x100000001b3;
    return *this;
  }
  template <class T>
  BitHash& add(const std::vector<T>& values) {
    return add(std::span<const T>(values));
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325;
};

}  // namespace tessera::testing
