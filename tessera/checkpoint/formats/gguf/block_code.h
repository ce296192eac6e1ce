// BlockCode: an encoding of values in GGUF files, which ggml calls a type. Quantized values of a block share scales.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace tessera::checkpoint {

struct BlockCode {
  std::string_view name;                                          // "Q4_1"
  uint32_t number = 0;                                            // ggml's number for this code, as in files
  int64_t values = 1;                                             // per block
  int64_t bytes = 1;                                              // per block
  void (*decode)(const uint8_t* block, float* values) = nullptr;  // to float32, bit for bit as Python's gguf package
  void (*encode)(const float* values, uint8_t* block) = nullptr;  // null if Tessera only reads this code
  int64_t file_type = -1;                                         // general.file_type of files whose matrices have this code
};

/// Returns ggml's name of the code with this number; empty for a number that ggml does not have.
std::string_view name_of_block_code(uint32_t number);
/// The codes that Tessera reads.
std::span<const BlockCode> block_codes();
/// Returns null if there is no code of that number or name.
const BlockCode* find_block_code(uint32_t number);
const BlockCode* find_block_code(std::string_view name);

}  // namespace tessera::checkpoint
