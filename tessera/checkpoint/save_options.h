// How a checkpoint is saved.
#pragma once

#include <optional>

#include "tessera/checkpoint/prune.h"

namespace tessera::checkpoint {

struct SaveOptions {
  /// After the commit, old checkpoints of the run are removed. The folder must be one of step_folder().
  std::optional<Keep> keep = {};
  /// For file systems that can't rename folders, as those in front of object stores: ranks write into the folder itself, and it is a
  /// checkpoint as soon as it has the files of all ranks and manifest.json, which is written last.
  bool in_place = false;
};

}  // namespace tessera::checkpoint
