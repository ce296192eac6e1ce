// Removes old checkpoints of a run.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera::checkpoint {

/// Says which checkpoints of a prefix stay. The newest one always does.
struct Keep {
  int last = 1;             // the newest ones
  int64_t every = 0;        // and those whose step is a multiple of this; 0 for none
  int best = 0;             // and this many with the best values of `metric`
  std::string metric = {};  // the name of a note that is a number
  bool higher_is_better = false;
};

/// Throws UsageError for settings that make no sense.
void expect_sensible(const Keep& keep);

/// Removes all complete checkpoints PREFIX-step-N that `keep` does not name, oldest first, and returns their folders. Incomplete ones stay,
/// and so does `also`. If a removal is interrupted, latest() skips the folder, unless the files of all ranks are still there. Call it
/// in one process only.
std::vector<std::filesystem::path> prune(const std::filesystem::path& prefix, const Keep& keep, const std::filesystem::path& also = {});
/// The same for programs of several ranks: rank 0 removes the folders, and its error is thrown on all ranks. Collective.
std::vector<std::filesystem::path> prune(const std::filesystem::path& prefix, const Keep& keep, const Communicator& world);

}  // namespace tessera::checkpoint
