// Makes files with the whole model from a checkpoint of any format, as `accelerate merge-weights` does.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint/convert.h"

namespace tessera::checkpoint {

struct MergeOptions {
  int64_t max_shard_size = 5'000'000'000;    // bytes in a safetensors file
  std::optional<at::ScalarType> dtype = {};  // of floating-point tensors; the checkpoint's dtypes unless given
  bool unsafe_serialization = false;         // pytorch_model.bin, a file of torch.save, instead of safetensors
  bool remove_checkpoint_dir = false;        // after all is written; an error if the folder holds other files, too
  ConvertProgress progress = {};
};

/// Writes OUT/model.safetensors, or model-00001-of-0000N.safetensors and their index. Reads and writes tensor by tensor, with memory for
/// one tensor. Verifies all checksums of the model first.
Converted merge(const std::filesystem::path& checkpoint, const std::filesystem::path& out, const MergeOptions& options = {});

}  // namespace tessera::checkpoint
