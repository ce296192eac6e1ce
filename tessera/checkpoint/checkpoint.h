// Checkpoints of a training run: a folder with one file per rank. A folder under its final name is complete, unless it is written in place
// (SaveOptions::in_place).
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "tessera/checkpoint/base.h"
#include "tessera/checkpoint/load_options.h"
#include "tessera/checkpoint/notes.h"
#include "tessera/checkpoint/optimizer_ref.h"
#include "tessera/checkpoint/save_options.h"
#include "tessera/comm/communicator.h"

namespace torch::nn {
class Module;
}

namespace tessera::optim {
class Average;
}

namespace tessera::checkpoint {

/// The parts of a training run that a checkpoint holds. A checkpoint also holds the states of libtorch's default generators: of the CPU,
/// and of the device where the ranks communicate.
struct Contents {
  torch::nn::Module* model = nullptr;
  /// A pointer to an optimizer of tessera::optim or torch::optim, or {&one, &another} for several of one class; null to save or load
  /// weights only.
  OptimizerRef optimizer = {};
  optim::Average* average = nullptr;  // average of the model or of a part of it; saved with the optimizer's state
  Notes notes = {};                   // anything else: step, position, learning rate
  /// With a base, a save leaves out the frozen values of the model and refers to the base instead, and a load expects that the model holds
  /// the base already. Only Tessera's format can refer to a base.
  std::optional<Base> base = {};
  /// Extra tensors outside the model, such as statistics. They are the same on all ranks and are saved once. A load fills them in place,
  /// and creates undefined ones on the CPU.
  std::map<std::string, at::Tensor> tensors = {};
  /// Extra tensors of which each rank has its own rows (along dimension 0), such as a replay buffer. They are saved as one tensor, the rows
  /// of rank 0 first. A load fills the rows of each rank's tensor, whose number may differ from the save; all ranks together must have as
  /// many rows as were saved.
  std::map<std::string, at::Tensor> tensors_by_rank = {};
};

/// Saves a checkpoint. All ranks must see the same folder. The folder appears under its name after all ranks have written their files; if
/// there is an error, it does not appear. An error on one rank is thrown on all ranks. Collective.
void save(const std::filesystem::path& folder, const Contents& contents, const Communicator& world, const SaveOptions& options = {});

/// Loads a checkpoint into a model of the same parameters, which may be sharded differently and on another number of ranks, and fills
/// contents.notes. If anything does not fit, load() throws and changes nothing. Collective.
void load(const std::filesystem::path& folder, Contents& contents, const Communicator& world, const LoadOptions& options = {});

}  // namespace tessera::checkpoint
