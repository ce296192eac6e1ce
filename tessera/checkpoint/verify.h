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
  int64_t without_checksum = 0;          // tensors that an older version or another program has written
  std::vector<std::string> faults = {};  // what is damaged, with file and tensor; empty if all is well
};

struct VerifyOptions {
  bool cheap = false;  // compare only the sizes of files, and their headers
};

/// What is first found to be damaged in a checkpoint of any format, of which each rank reads a share; the same on all ranks. Throws IoError
/// if it can't be read, which is another matter. Collective.
std::optional<std::string> damage_in(const std::filesystem::path& path, const Communicator& world);

/// Reads all that has a checksum in a checkpoint of any format, and compares them. Throws IoError if there is none, or it is incomplete.
Verified verify(const std::filesystem::path& path, const VerifyOptions& options = {});

}  // namespace tessera::checkpoint
