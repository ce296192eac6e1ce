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

/// Reads the manifest of a checkpoint of Tessera, or makes one for a checkpoint of another program. The manifest that it makes has one rank
/// (unless the files tell of more ranks), the optimizer's state under PyTorch's keys, and the other values as notes. `names` help to find
/// the model in the files.
Manifest read_run(const std::filesystem::path& path, const ModelNames& names = {});

/// Makes a manifest for a catalog with another program's names, whose model and optimizer may be under keys of their own (see Places).
/// Catalog::left_out lists everything that can't be used, such as state that identifies parameters only by numbers, unless
/// ModelNames::groups has their names.
Manifest run_of(Catalog catalog, const ModelNames& names = {});

/// Returns the notes that this rank has saved. If another number of ranks has saved, returns the notes of rank 0; then throws UsageError if
/// notes differ by rank, unless options.notes_of_first_rank is set.
std::map<std::string, std::string> notes_of_rank(const Manifest& run, int rank, int ranks, const LoadOptions& options);

/// The parameter and the key in the name optimizer.PARAMETER.KEY.
struct StateName {
  std::string parameter, key;
};
StateName state_name(const std::string& name);

/// Whether the tensor of this name is state of the optimizer, or a tensor of the model.
bool is_optimizer_state(const std::string& name, const Manifest& manifest);
bool is_of_model(const std::string& name, const Manifest& manifest);

/// The reason in Catalog::left_out why a checkpoint of only the model lacks a tensor.
inline constexpr auto kStandsBeside = "it is an extra tensor outside the model";
/// Returns the names of the extra tensors, without kBesidePrefix.
std::vector<std::string> names_beside(const Manifest& manifest);
/// Whether an extra tensor can have this name in all formats, because no format uses the name for something else.
bool is_free_name(const std::string& name);

}  // namespace tessera::checkpoint
