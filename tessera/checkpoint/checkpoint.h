// Checkpoints of a training run: a folder with one file of each rank, complete or not there at all.
#pragma once

#include <filesystem>
#include <map>
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

}  // namespace tessera::checkpoint
