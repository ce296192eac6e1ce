// Room that a file has for the values of a tensor before they are there, so that several processes can write them.
#pragma once

#include <cstdint>
#include <filesystem>

namespace tessera::checkpoint {

/// The values will lie behind each other in row-major order.
struct Room {
  std::filesystem::path file;  // NewFile::part()
  uint64_t offset = 0;         // in bytes
};

}  // namespace tessera::checkpoint
