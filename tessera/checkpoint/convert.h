// Writes a checkpoint of any format again, in another format or for another number of ranks.
#pragma once

#include <filesystem>

#include "tessera/checkpoint/convert_options.h"

namespace tessera::checkpoint {

/// Throws UsageError if the name ends as those of another format do, such as model.pt for safetensors, or for folders.
void expect_ending_of(const std::filesystem::path& out, Format format);
/// Throws UsageError if `out` is the checkpoint, or lies in it.
void expect_outside(const std::filesystem::path& out, const std::filesystem::path& checkpoint);

/// Reads and writes piece by piece. Everything with a checksum is compared first. The output appears when it is complete: a file replaces
/// one of its name, a folder must not be there yet, but a Hub folder may hold other files. Throws UsageError for what the format can't
/// hold.
Converted convert(const std::filesystem::path& checkpoint, const std::filesystem::path& out, const ConvertOptions& options);

/// Writes a checkpoint of Tessera of so many ranks.
Converted reshard(const std::filesystem::path& checkpoint, const std::filesystem::path& out, int world);

}  // namespace tessera::checkpoint
