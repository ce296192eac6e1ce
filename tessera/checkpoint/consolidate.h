// One file of a whole model from the files of its ranks.
#pragma once

#include <cstdint>
#include <filesystem>

namespace tessera::checkpoint {

/// What consolidate() has written.
struct Consolidated {
  int64_t parameters = 0;  // values
  int64_t tensors = 0;     // parameters and buffers
  int64_t bytes = 0;
};

/// Puts the ranks' parts of all parameters together, with rank 0's buffers, into one safetensors file. Needs no ranks, and memory for one
/// parameter only. A parameter that a model has under several names is there under the first; the metadata says which one that is for each
/// of the others.
Consolidated consolidate(const std::filesystem::path& folder, const std::filesystem::path& save_path);

}  // namespace tessera::checkpoint
