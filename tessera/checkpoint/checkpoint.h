// Checkpoints of a training run: a folder with one file of each rank, complete or not there at all.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "tessera/comm/communicator.h"

namespace torch::nn {
class Module;
}
namespace tessera::optim {
class Optimizer;
}

namespace tessera::checkpoint {

/// What a checkpoint holds of a training run. Pointers, since both saving and loading use it. The state of libtorch's default generator
/// for the CPU belongs to it, too.
struct Contents {
  torch::nn::Module* model = nullptr;
  optim::Optimizer* optimizer = nullptr;          // none: weights only
  std::map<std::string, std::string> notes = {};  // anything else, as text: position, learning rate, step
};

/// Collective. The folder, which all ranks must see, appears under its name when all of them have written their parts; until then, and
/// after an error, there is none. An error on one rank is an error on all.
void save(const std::filesystem::path& folder, const Contents& contents, const Communicator& world);

/// Collective. Into a model of the same shape on as many ranks; fills contents.notes. Nothing is changed if anything does not fit.
void load(const std::filesystem::path& folder, Contents& contents, const Communicator& world);

/// Throws if no checkpoint could be made under that prefix: better known before a training run than after it.
void expect_usable(const std::filesystem::path& prefix);
/// The newest checkpoint `PREFIX-step-N`, by N; nothing if there is none. Throws IoError if it is incomplete.
std::optional<std::filesystem::path> latest(const std::filesystem::path& prefix);
/// PREFIX-step-000500
std::filesystem::path step_folder(const std::filesystem::path& prefix, int64_t step);
/// Whether the folder holds the files of all its ranks.
bool is_complete(const std::filesystem::path& folder);

/// What consolidate() has written.
struct Consolidated {
  int64_t parameters = 0;  // values
  int64_t tensors = 0;     // parameters and buffers
  int64_t bytes = 0;
};

/// Puts the ranks' parts of all parameters together, with rank 0's buffers, into one safetensors file. Needs no ranks, and memory for one
/// parameter only. A parameter that a model has under several names is there under the first; the metadata says which one that is for each
/// of the others.
Consolidated consolidate(const std::filesystem::path& folder, const std::filesystem::path& save_path);

}  // namespace tessera::checkpoint
