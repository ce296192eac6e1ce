// Checks the files of a checkpoint without a model.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera::checkpoint {

struct Verified {
  int64_t files = 0, tensors = 0, bytes = 0;
  int64_t without_checksum = 0;          // tensors without a checksum, from an older version or another program
  bool without_manifest = false;         // a checkpoint of Tessera without manifest.json, which is judged by the headers of its files
  std::vector<std::string> faults = {};  // what is damaged, with file and tensor; empty if all is well
};

struct VerifyOptions {
  bool cheap = false;  // compare only the sizes of files, and their headers
};

/// Returns the first damage found in a checkpoint of any format; each rank reads a share, and all ranks return the same. Throws IoError if
/// the checkpoint can't be read at all. Collective.
std::optional<std::string> damage_in(const std::filesystem::path& path, const Communicator& world);

/// Verifies all checksums of a checkpoint of any format. Throws IoError if the checkpoint is missing or incomplete.
Verified verify(const std::filesystem::path& path, const VerifyOptions& options = {});

}  // namespace tessera::checkpoint
