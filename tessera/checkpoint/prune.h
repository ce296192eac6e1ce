// Removes old checkpoints of a run.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera::checkpoint {

/// Says which checkpoints of a prefix stay. The newest checkpoint always stays.
struct Keep {
  int last = 1;             // keeps this many of the newest checkpoints
  int64_t every = 0;        // also keeps checkpoints whose step is a multiple of this; 0 for none
  int best = 0;             // also keeps this many with the best values of `metric`
  std::string metric = {};  // the name of a note that is a number
  bool higher_is_better = false;
};

/// Throws UsageError for settings that make no sense.
void expect_sensible(const Keep& keep);

/// Removes all complete checkpoints PREFIX-step-N that `keep` does not select, oldest first, and returns their folders. Incomplete
/// checkpoints stay, and so does the folder `also`. If a removal is interrupted, latest() skips the folder, unless the files of all ranks
/// are still there. Call it in one process only.
std::vector<std::filesystem::path> prune(const std::filesystem::path& prefix, const Keep& keep, const std::filesystem::path& also = {});
/// The same for programs of several ranks: rank 0 removes the folders, and its error is thrown on all ranks. Collective.
std::vector<std::filesystem::path> prune(const std::filesystem::path& prefix, const Keep& keep, const Communicator& world);

}  // namespace tessera::checkpoint
