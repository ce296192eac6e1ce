// DynamicCode: stores a block of values as one scale and eight bits for each value, with more codes near zero. It equals the "dynamic" code
// of bitsandbytes to the bit. Scales of quantised weights and the state of optimizers are stored in it.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace tessera {

class DynamicCode {
 public:
  static constexpr int64_t kBlock = 256;   // the number of values that share a scale
  static constexpr int64_t kLeast = 4096;  // the optimizer state of a tensor with fewer values stays in float32

  /// of_signed() is for values of both signs, of_unsigned() for values that are never negative.
  static const DynamicCode& of_signed();
  static const DynamicCode& of_unsigned();

  /// Writes the codes of one block and returns its scale: the largest magnitude in it, or NaN if a value is NaN or infinite.
  float encode(std::span<const float> values, uint8_t* codes) const;
  void decode(const uint8_t* codes, float scale, std::span<float> values) const;
  float value(uint8_t code) const { return values_[code]; }
  /// All 256 values, ascending.
  std::span<const float, 256> values() const { return values_; }

 private:
  explicit DynamicCode(bool is_signed);

  std::array<float, 256> values_;
  std::array<uint8_t, 65536> code_of_;  // [i] is the code of -1 + 2 i / 65535
};

}  // namespace tessera
