// Folders of Accelerate's save_state: the model and the optimizer in folders of torch.distributed.checkpoint (SHARDED_STATE_DICT) or in
// files of torch.save (FULL_STATE_DICT), and files of the scheduler, the generators and so on beside them.
#pragma once

#include <filesystem>
#include <string>

#include "tessera/checkpoint/stored/catalog.h"

namespace tessera::checkpoint {

namespace accelerate {
constexpr auto kModel = "pytorch_model_fsdp";  // kModel_0 is a folder, kModel.bin a file
constexpr auto kOptimizer = "optimizer";
constexpr auto kGenerators = "random_states_";
constexpr auto kTorchGenerator = "torch_manual_seed";
}  // namespace accelerate

/// Whether the folder has the files that save_state writes.
bool is_accelerate_folder(const std::filesystem::path& folder);

/// Whether the file has a name that Accelerate gives to files in such a folder.
bool is_accelerate_file(const std::filesystem::path& file);

/// Reads the tensors of the first model as model.NAME, those of the first optimizer as optimizer.state.NAME.KEY, and the states of all
/// ranks' torch generators as generator.cpu. The files of generators come first in the catalog. Values in other files are named after their
/// file, such as scheduler.last_epoch.
Catalog read_accelerate(const std::filesystem::path& folder);

}  // namespace tessera::checkpoint
