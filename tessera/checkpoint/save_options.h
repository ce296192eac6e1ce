// Options of checkpoint::save and AsyncSaver.
#pragma once

#include <cstdint>
#include <optional>

#include "tessera/checkpoint/format.h"
#include "tessera/checkpoint/prune.h"

namespace tessera::checkpoint {

struct SaveOptions {
  /// Every rank writes its part, whatever the format. An Accelerate folder can't hold extra tensors, and replaces an earlier Accelerate
  /// folder of its name when it is complete. A Hub folder or a safetensors file holds the model alone, and replaces an earlier model of its
  /// name. AsyncSaver writes only Tessera's format.
  Format format = Format::Tessera;
  AccelerateLayout accelerate_layout = AccelerateLayout::Sharded;  // layout of Accelerate's folders
  int64_t max_shard_size = 5'000'000'000;                          // most bytes in each file of a Hub folder, unless a tensor is larger
  /// Removes old checkpoints of the run after the commit. The folder must be one of step_folder(). Only in Tessera's format.
  std::optional<Keep> keep = {};
  /// For file systems that can rename files but not folders, such as some that mount object stores: ranks write into the folder itself, and
  /// it is a checkpoint as soon as it has the files of all ranks. manifest.json is written last. Only in Tessera's format.
  bool in_place = false;
};

}  // namespace tessera::checkpoint
