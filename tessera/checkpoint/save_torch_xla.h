// Writes the rank files of torch_xla's FSDP, from a live model or from a checkpoint of any format.
#pragma once

#include <filesystem>
#include <optional>
#include <vector>

#include "tessera/base/module_ref.h"
#include "tessera/checkpoint/formats/torch_xla/torch_xla.h"
#include "tessera/comm/communicator.h"

namespace tessera::checkpoint {

/// Writes PREFIX_rank-R-of-N.pth on each rank R of N, or nothing on any of them: {"model": ..., "shard_metadata": ...}. Unless options are
/// given, the modules that fully_shard was called on are those that are wrapped there. All ranks must see the same files, among which the
/// folder PREFIX_rank.part has the values on their way. Collective.
void save_torch_xla(const std::filesystem::path& prefix, ModuleRef model, const Communicator& world,
                    const std::optional<TorchXlaOptions>& options = {});

/// Writes the files of all ranks from a checkpoint, or none. Returns their names. Rank files of torch_xla are divided over another number
/// of ranks, with the state of the optimizer, and wrapped as before unless options are given.
std::vector<std::filesystem::path> convert_to_torch_xla(const std::filesystem::path& checkpoint, const std::filesystem::path& prefix,
                                                        int ranks, const std::optional<TorchXlaOptions>& options = {});

}  // namespace tessera::checkpoint
