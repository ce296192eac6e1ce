// Writes the folder of Accelerate's save_state from a live run.
#pragma once

#include <filesystem>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/communicator.h"

namespace tessera::checkpoint {

struct SaveAccelerateOptions {
  /// Files of torch.save as for FULL_STATE_DICT, in place of folders of torch.distributed.checkpoint (SHARDED_STATE_DICT).
  bool full_state_dict = false;
  /// model.safetensors and optimizer.bin, as Accelerate has them without FSDP (MULTI_CPU).
  bool replicated = false;
  /// Replaces whatever is there, at which the caller has looked.
  bool replaces_any = false;
};

/// Saves a run, with the settings of the optimizer's groups, as a folder that Accelerator.load_state and checkpoint::load read. It replaces
/// an earlier folder of Accelerate's once it is complete. All ranks must see the same files, among which FOLDER.native has the values on
/// their way. An error on one rank is thrown on all, and leaves what was there. Collective.
void save_accelerate(const std::filesystem::path& folder, const Contents& contents, const Communicator& world,
                     const SaveAccelerateOptions& options = {});

}  // namespace tessera::checkpoint
