// Checks the files of a checkpoint without a model.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace tessera::checkpoint {

struct Verified {
  int64_t files = 0, tensors = 0, bytes = 0;
  int64_t without_checksum = 0;          // tensors that an older version or another program has written
  std::vector<std::string> faults = {};  // what is damaged, with file and tensor; empty if all is well
};

/// Reads every file of a checkpoint's folder, or one safetensors file, and compares the checksums. Throws IoError if there is neither.
Verified verify(const std::filesystem::path& folder_or_file);

}  // namespace tessera::checkpoint
