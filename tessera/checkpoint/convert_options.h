// How a checkpoint is converted, and what came of it.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint/format.h"
#include "tessera/checkpoint/notes.h"

namespace tessera::checkpoint {

/// Called after each piece of a tensor with its name, and the bytes that are written and to be written.
using ConvertProgress = std::function<void(const std::string& name, int64_t bytes, int64_t all)>;

/// Of a checkpoint: each has a file.
inline constexpr int kMostRanks = 65'536;

struct ConvertOptions {
  Format to = Format::Tessera;
  std::optional<Format> from = {};  // what the input has to be; it is recognised unless given
  int world = 1;                    // the number of ranks whose files are written, where the format has such
  /// Only the model. Hub folders and safetensors files hold nothing else.
  bool weights_only = false;
  std::string model_key = {};                // under which a file of torch.save has the model if it has nothing else; {"model": ...}
  std::optional<at::ScalarType> dtype = {};  // of the model's numbers with fractions; that of the checkpoint unless given
  int64_t max_shard_size = 5'000'000'000;    // bytes of a file in a Hub folder
  AccelerateLayout accelerate_layout = AccelerateLayout::Sharded;
  /// Settings of the optimizer for Python, which takes all of them from the files, such as {"lr", 0.001}; what is no number is JSON, such
  /// as {"betas", "[0.9, 0.99]"}. The others are those of the checkpoint, if it has them, or PyTorch's defaults.
  Notes settings = {};
  /// Notes that differ by rank, where the output can't have them by rank, are an error, or those of rank 0 are taken.
  bool notes_of_first_rank = false;
  int64_t memory = 1'000'000'000;  // bytes of a tensor that are in memory at once
  ConvertProgress progress = {};
};

struct Converted {
  Format from = Format::Tessera;
  std::vector<std::filesystem::path> files = {};  // or the folder
  int64_t tensors = 0, bytes = 0;
  int64_t parameters = 0;                            // values in all of them; where the input does not tell buffers from them, in both
  std::map<std::string, std::string> left_out = {};  // what the output lacks, and why
};

}  // namespace tessera::checkpoint
