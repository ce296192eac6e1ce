// Makes one file with the full model from a checkpoint's files of all ranks.
#pragma once

#include <cstdint>
#include <filesystem>

#include "tessera/comm/communicator.h"

namespace tessera::checkpoint {

/// What consolidate() has written.
struct Consolidated {
  int64_t parameters = 0;  // number of values in all parameters
  int64_t tensors = 0;     // number of parameters and buffers
  int64_t bytes = 0;
};

/// Writes the full parameters and rank 0's buffers to one safetensors file. It runs in one process, without a world, and needs memory for
/// only one parameter at a time. A tied parameter is saved under its first name; the metadata maps each of its other names to the first.
Consolidated consolidate(const std::filesystem::path& folder, const std::filesystem::path& save_path);
/// The same for programs of several ranks: rank 0 does it, and every rank returns when the file is there, with the same result. An error is
/// thrown on all ranks. Collective.
Consolidated consolidate(const std::filesystem::path& folder, const std::filesystem::path& save_path, const Communicator& world);

}  // namespace tessera::checkpoint
