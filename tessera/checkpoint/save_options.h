// How a checkpoint is saved.
#pragma once

#include <optional>

#include "tessera/checkpoint/prune.h"

namespace tessera::checkpoint {

struct SaveOptions {
  /// After the commit, old checkpoints of the run are removed. The folder must be one of step_folder().
  std::optional<Keep> keep = {};
  /// For file systems that can rename files but not folders, as some in front of object stores: ranks write into the folder itself, and it
  /// is a checkpoint as soon as it has the files of all ranks. manifest.json is written last.
  bool in_place = false;
};

}  // namespace tessera::checkpoint
