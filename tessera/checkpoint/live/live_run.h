// LiveRun: a run that is in memory, described as one that is stored, so that it is written in other formats as stored ones are.
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
  /// One for each rank, as if its file were written already. Only those of the ranks of this process have values, which are read from the
  /// tensors of the model and the optimizer.
  std::vector<InputFile> memories = {};
};

/// Of the ranks of this process. `failure` is what errors of other ranks say. Collective.
LiveRun live_run(const std::vector<RankContents>& own, const Communicator& world, std::string_view failure);

}  // namespace tessera::checkpoint
