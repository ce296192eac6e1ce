// Describes a run in memory like a stored one, so that the writers of all formats can save it.
#pragma once

#include <string_view>
#include <vector>

#include "tessera/base/input_file.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/live/rank_contents.h"
#include "tessera/checkpoint/stored/manifest.h"

namespace tessera::checkpoint {

struct LiveRun {
  Manifest run = {};
  /// A file in memory for each rank, as the rank would write it. Only the files of this process's ranks have values, which are read from
  /// the tensors of the model and the optimizer.
  std::vector<InputFile> memories = {};
};

/// Describes a run by the contents of this process's ranks. Errors of other ranks say `failure`. Collective.
LiveRun live_run(const std::vector<RankContents>& own, const Communicator& world, std::string_view failure);

}  // namespace tessera::checkpoint
