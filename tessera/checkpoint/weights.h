// Loads weights of any format into a model.
#pragma once

#include <filesystem>

#include "tessera/checkpoint/load_options.h"

namespace torch::nn {
class Module;
}

namespace tessera::checkpoint {

/// Copies parameters and buffers into a module, which may be sharded: from a file of safetensors or torch.save, a folder of the Hugging
/// Face Hub or of torch.distributed.checkpoint, or a checkpoint of Tessera. Every rank reads its own part of them. Unless the names and
/// shapes are those of the module, it throws UsageError and changes nothing. What has a checksum is compared first, by each rank a share if
/// the module is sharded: then it is collective, and an error on one rank is one on all.
void load_weights(torch::nn::Module& module, const std::filesystem::path& path, const LoadOptions& options = {});

}  // namespace tessera::checkpoint
