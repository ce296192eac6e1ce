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
  int64_t max_shard_size = 5'000'000'000;    // most bytes in each file; a larger tensor has a file of its own
  std::optional<at::ScalarType> dtype = {};  // dtype of floating-point tensors; the checkpoint's dtypes unless given
  bool unsafe_serialization = false;         // writes pytorch_model.bin, a file of torch.save, instead of safetensors
  bool remove_checkpoint_dir = false;        // removes the checkpoint after all is written; an error if its folder holds other files, too
  ConvertProgress progress = {};
};

/// Writes OUT/model.safetensors, or model-00001-of-0000N.safetensors and their index. Reads and writes tensor by tensor, and needs memory
/// for one tensor. Verifies all checksums of the model first.
Converted merge(const std::filesystem::path& checkpoint, const std::filesystem::path& out, const MergeOptions& options = {});

}  // namespace tessera::checkpoint
