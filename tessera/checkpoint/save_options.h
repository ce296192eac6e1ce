// Options of checkpoint::save and AsyncSaver.
#pragma once

#include <cstdint>
#include <optional>

#include "tessera/checkpoint/format.h"
#include "tessera/checkpoint/prune.h"

namespace tessera::checkpoint {

struct SaveOptions {
  /// Every rank writes its part, whatever the format. Accelerate's folders hold no extra tensors, and replace an earlier folder
  /// of Accelerate's when they are complete. Hub folders and safetensors files hold the model alone, and replace an earlier one. AsyncSaver
  /// knows only Tessera's format.
  Format format = Format::Tessera;
  AccelerateLayout accelerate_layout = AccelerateLayout::Sharded;  // of Accelerate's folders
  int64_t max_shard_size = 5'000'000'000;                          // bytes of a file in a Hub folder
  /// Removes old checkpoints of the run after the commit. The folder must be one of step_folder(). Only in Tessera's format.
  std::optional<Keep> keep = {};
  /// For file systems that can rename files but not folders, as some in front of object stores: ranks write into the folder itself, and it
  /// is a checkpoint as soon as it has the files of all ranks. manifest.json is written last. Only in Tessera's format.
  bool in_place = false;
};

}  // namespace tessera::checkpoint
