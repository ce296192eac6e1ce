// Folders of Accelerate's save_state: the model and the optimizer in folders of torch.distributed.checkpoint (SHARDED_STATE_DICT) or in
// files of torch.save (FULL_STATE_DICT), and files of the scheduler, the generators and so on beside them.
#pragma once

#include <filesystem>
#include <string>

#include "tessera/checkpoint/stored/catalog.h"

namespace tessera::checkpoint {

namespace accelerate {
constexpr auto kModel = "pytorch_model_fsdp";  // _0 is a folder, .bin a file
constexpr auto kOptimizer = "optimizer";
constexpr auto kGenerators = "random_states_";
constexpr auto kTorchGenerator = "torch_manual_seed";
}  // namespace accelerate

/// Whether the folder has such files.
bool is_accelerate_folder(const std::filesystem::path& folder);

/// Whether a file of such a folder has one of Accelerate's names.
bool is_accelerate_file(const std::filesystem::path& file);

/// The tensors of the first model as model.NAME, those of the first optimizer as optimizer.state.NAME.KEY, and the state of each rank's
/// generator of torch, in the first files, as generator.cpu. The values of other files are named after the file: scheduler.last_epoch.
Catalog read_accelerate(const std::filesystem::path& folder);

}  // namespace tessera::checkpoint
