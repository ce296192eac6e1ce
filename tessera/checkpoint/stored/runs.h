// What a checkpoint of any format holds of a training run, under the names that we have for it.
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "tessera/checkpoint/load_options.h"
#include "tessera/checkpoint/stored/manifest.h"

namespace tessera::checkpoint {

/// The note with the settings of an optimizer of PyTorch: its param_groups as JSON, with names of parameters.
inline constexpr auto kSettingsNote = "optimizer.param_groups";

/// Of Tessera's checkpoints their manifest. Those of other programs have one rank unless they say more, tensors of the optimizer's state
/// under PyTorch's keys, and notes made of the other values.
Manifest read_run(const std::filesystem::path& path);

/// The same of a catalog of another program's names. The model may be under the key "model", the optimizer under "optimizer", as the names
/// tell. What can't be used is in Catalog::left_out, among it the state of an optimizer that knows its parameters by numbers only.
Manifest run_of(Catalog catalog);

/// The notes that this rank of so many has made; on another number of ranks than saved, those on which all ranks agree. Throws UsageError
/// if they do not, unless the options allow that.
std::map<std::string, std::string> notes_of_rank(const Manifest& run, int rank, int ranks, const LoadOptions& options);

/// The parameter and the key of optimizer.PARAMETER.KEY.
struct StateName {
  std::string parameter, key;
};
StateName state_name(const std::string& name);

/// Whether a tensor is state of the optimizer, or one of the model.
bool is_optimizer_state(const std::string& name, const Manifest& manifest);
bool is_of_model(const std::string& name, const Manifest& manifest);

}  // namespace tessera::checkpoint
