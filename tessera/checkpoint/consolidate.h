// Makes one file with the full model from the files of all ranks.
#pragma once

#include <cstdint>
#include <filesystem>

#include "tessera/checkpoint/convert.h"
#include "tessera/comm/communicator.h"

namespace tessera::checkpoint {

/// Throws UsageError if consolidate() can't write a file with the extension of this name.
void expect_known_ending(const std::filesystem::path& save_path);

/// The usual name of such a file: PREFIX_consolidated.pth, or .safetensors in an object store, where no .pth can be written.
std::filesystem::path consolidated_name(const std::filesystem::path& prefix);

/// Writes the model of a checkpoint of any format to one file. If the name ends in .pth, .pt or .bin, writes {"model": ...} as torch.save
/// does; if the name ends in .safetensors or has no extension, writes safetensors; throws UsageError for other extensions. Runs in one
/// process, without a world, and needs memory for one parameter at a time. In a safetensors file, a tied parameter is saved under its first
/// name, and the metadata maps each of its other names to the first.
Converted consolidate(const std::filesystem::path& checkpoint, const std::filesystem::path& save_path,
                      const ConvertProgress& progress = {});
/// The same for programs of several ranks: rank 0 writes the file, and every rank returns when it sees the file. Converted::from and
/// Converted::left_out are set on rank 0 only. An error is thrown on all ranks. Collective.
Converted consolidate(const std::filesystem::path& checkpoint, const std::filesystem::path& save_path, const Communicator& world);

}  // namespace tessera::checkpoint
