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

struct VerifyOptions {
  bool cheap = false;  // compare only the sizes of files, and their headers
};

/// Reads all that has a checksum in a checkpoint of any format, and compares them. Throws IoError if there is none, or it is incomplete.
Verified verify(const std::filesystem::path& path, const VerifyOptions& options = {});

}  // namespace tessera::checkpoint
