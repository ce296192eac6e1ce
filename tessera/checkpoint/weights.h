// Whole weights from one file, as consolidate() writes them, or Python.
#pragma once

#include <filesystem>

namespace torch::nn {
class Module;
}

namespace tessera::checkpoint {

/// Copies all parameters and buffers of a safetensors file into a module, plain or sharded; every rank reads the same file. Names and
/// shapes must be the module's, all of them; if anything does not fit nothing is changed.
void load_weights(torch::nn::Module& module, const std::filesystem::path& file);

}  // namespace tessera::checkpoint
