// Removes old checkpoints of a run.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera::checkpoint {

/// Which checkpoints of a prefix stay. The newest one always does.
struct Keep {
  int last = 1;             // the newest ones
  int64_t every = 0;        // and those whose step is a multiple of this; 0 for none
  int best = 0;             // and so many with the best metric,
  std::string metric = {};  // a note that is a number
  bool higher_is_better = false;
};

/// Throws UsageError for one that can't be meant.
void expect_sensible(const Keep& keep);

/// Removes all checkpoints PREFIX-step-N that `keep` does not name, oldest first, and returns them. Folders that are no complete checkpoint
/// stay. A checkpoint that is being removed is none any more, so that it is never taken for one, whenever this ends. For one process.
/// `also` stays in any case.
std::vector<std::filesystem::path> prune(const std::filesystem::path& prefix, const Keep& keep, const std::filesystem::path& also = {});
/// The same for programs of several ranks: rank 0 does it, and an error is thrown on all ranks. Collective.
std::vector<std::filesystem::path> prune(const std::filesystem::path& prefix, const Keep& keep, const Communicator& world);

}  // namespace tessera::checkpoint
