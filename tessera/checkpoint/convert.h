// Converts a checkpoint of any format to another format or another number of ranks.
#pragma once

#include <filesystem>

#include "tessera/checkpoint/convert_options.h"

namespace tessera::checkpoint {

/// Throws UsageError if the name has the ending of another format, such as model.pt for safetensors or for a format of folders.
void expect_ending_of(const std::filesystem::path& out, Format format);
/// Throws UsageError if `out` is the checkpoint or a path inside it.
void expect_outside(const std::filesystem::path& out, const std::filesystem::path& checkpoint);

/// Converts a checkpoint piece by piece, after a check of all its checksums. The output appears when it is complete. An output file
/// replaces a file of the same name; an output folder must not exist, except a Hub folder, which may hold other files. Throws UsageError
/// for contents that the format can't hold.
Converted convert(const std::filesystem::path& checkpoint, const std::filesystem::path& out, const ConvertOptions& options);

/// Writes the checkpoint in Tessera's format for `world` ranks.
Converted reshard(const std::filesystem::path& checkpoint, const std::filesystem::path& out, int world);

}  // namespace tessera::checkpoint
