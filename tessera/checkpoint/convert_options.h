// Options and result of convert().
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

/// Called after each piece of a tensor, with the tensor's name, the bytes written so far, and the bytes to be written in all.
using ConvertProgress = std::function<void(const std::string& name, int64_t bytes, int64_t all)>;

/// The largest number of ranks of a checkpoint, which has a file for each rank.
inline constexpr int kMostRanks = 65'536;

struct ConvertOptions {
  Format to = Format::Tessera;
  std::optional<Format> from = {};  // the required format of the input; any format unless given
  int world = 1;                    // the number of ranks whose files are written, in formats with a file per rank
  /// Converts only the model. A conversion to a Hub folder or a safetensors file always does.
  bool weights_only = false;
  std::string model_key = {};                // the key of the model in a file of torch.save with weights only: {"model": ...}
  std::optional<at::ScalarType> dtype = {};  // dtype of the model's floating-point tensors; the checkpoint's dtypes unless given
  int64_t max_shard_size = 5'000'000'000;    // most bytes in each file of a Hub folder; a larger tensor has a file of its own
  AccelerateLayout accelerate_layout = AccelerateLayout::Sharded;
  /// Settings of the optimizer, such as {"lr", 0.001}, to write for Python, which takes all settings from the files. Values other than
  /// numbers are given as JSON, such as {"betas", "[0.9, 0.99]"}. Settings that are not given are those of the checkpoint if it has them,
  /// or else PyTorch's defaults.
  Notes settings = {};
  /// If notes differ by rank and the output has one set of notes for all ranks: true takes the notes of rank 0, false makes convert()
  /// throw.
  bool notes_of_first_rank = false;
  int64_t memory = 1'000'000'000;  // most bytes of a tensor that are in memory at once
  ConvertProgress progress = {};
};

struct Converted {
  Format from = Format::Tessera;
  std::vector<std::filesystem::path> files = {};  // the files that were written, or their folder
  int64_t tensors = 0, bytes = 0;
  int64_t parameters = 0;                            // values in parameters; includes buffers if the input doesn't tell them apart
  std::map<std::string, std::string> left_out = {};  // from the name of what the output lacks to the reason
};

}  // namespace tessera::checkpoint
