// Reads checkpoints of any format as training runs, under Tessera's names.
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "tessera/checkpoint/load_options.h"
#include "tessera/checkpoint/stored/manifest.h"
#include "tessera/checkpoint/stored/places.h"

namespace tessera::checkpoint {

/// The note with the settings of an optimizer of PyTorch: its param_groups as JSON, with names of parameters.
inline constexpr auto kSettingsNote = "optimizer.param_groups";

/// Reads the manifest of a checkpoint of Tessera. Runs of other programs have one rank unless the files say more, state of the optimizer
/// under PyTorch's keys, and notes made of the other values. The names of the model tell where it lies.
Manifest read_run(const std::filesystem::path& path, const ModelNames& names = {});

/// The same for a catalog with another program's names, whose model and optimizer may be under keys of their own (see Places). What can't
/// be used is in Catalog::left_out, such as state that knows parameters only by numbers, unless ModelNames::groups is given.
Manifest run_of(Catalog catalog, const ModelNames& names = {});

/// Returns the notes that this rank has saved; on another number of ranks, those of rank 0. Throws UsageError if notes then differ between
/// the ranks that saved, unless the options allow that.
std::map<std::string, std::string> notes_of_rank(const Manifest& run, int rank, int ranks, const LoadOptions& options);

/// The parameter and the key of optimizer.PARAMETER.KEY.
struct StateName {
  std::string parameter, key;
};
StateName state_name(const std::string& name);

/// Whether a tensor is state of the optimizer, or one of the model.
bool is_optimizer_state(const std::string& name, const Manifest& manifest);
bool is_of_model(const std::string& name, const Manifest& manifest);

/// Why a checkpoint of the model alone lacks a tensor.
inline constexpr auto kStandsBeside = "it is a tensor beside the model";
/// The names of the tensors beside the model, without what the stored ones begin with.
std::vector<std::string> names_beside(const Manifest& manifest);
/// Whether a tensor beside the model can have this name in all formats: it would not be taken for something else.
bool is_free_name(const std::string& name);

}  // namespace tessera::checkpoint
