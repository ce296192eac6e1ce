// Bytes of a file that are reserved for the values of a tensor, so that several processes can write them.
#pragma once

#include <cstdint>
#include <filesystem>

namespace tessera::checkpoint {

/// The values will be contiguous, in row-major order.
struct ReservedBytes {
  std::filesystem::path file;  // the unfinished file, NewFile::part()
  uint64_t offset = 0;         // in bytes
};

}  // namespace tessera::checkpoint
