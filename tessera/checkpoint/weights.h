// Loads full weights from one safetensors file, as consolidate() or Python writes it.
#pragma once

#include <filesystem>

#include "tessera/checkpoint/load_options.h"

namespace torch::nn {
class Module;
}

namespace tessera::checkpoint {

/// Copies all parameters and buffers of the file into a module, which may be sharded. Every rank reads the same file. The file must have
/// exactly the names and shapes of the module; otherwise it throws IoError and changes nothing.
void load_weights(torch::nn::Module& module, const std::filesystem::path& path, const LoadOptions& options = {});

}  // namespace tessera::checkpoint
