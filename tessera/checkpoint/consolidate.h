// Makes one file with the full model from the files of all ranks.
#pragma once

#include <cstdint>
#include <filesystem>

#include "tessera/checkpoint/convert.h"
#include "tessera/comm/communicator.h"

namespace tessera::checkpoint {

/// What consolidate() has written.
struct Consolidated {
  int64_t parameters = 0;  // number of values in all parameters; where the format does not tell them from buffers, in these as well
  int64_t tensors = 0;     // number of parameters and buffers
  int64_t bytes = 0;
};

/// Throws UsageError unless consolidate() writes files of this name.
void expect_known_ending(const std::filesystem::path& save_path);

/// Writes the model of a checkpoint of any format to one file: {"model": ...} as torch.save writes it if the name ends in .pth, .pt or
/// .bin, or safetensors if it ends in .safetensors or has no extension; others are refused. It runs in one process, without a world, and
/// needs memory for one parameter at a time. In a safetensors file, a tied parameter is saved under its first name, and the metadata maps
/// each of its other names to the first.
Consolidated consolidate(const std::filesystem::path& checkpoint, const std::filesystem::path& save_path,
                         const ConvertProgress& progress = {});
/// The same for programs of several ranks: rank 0 does it, and every rank returns when the file is there, with the same result. An error is
/// thrown on all ranks. Collective.
Consolidated consolidate(const std::filesystem::path& checkpoint, const std::filesystem::path& save_path, const Communicator& world);

}  // namespace tessera::checkpoint
