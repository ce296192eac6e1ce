// Tar archives: where the files in one lie. Reads the headers of ustar, GNU's long names and the records of pax.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/base/input_file.h"

namespace tessera::vision {

/// A file in an archive.
struct TarMember {
  std::string name;
  uint64_t offset = 0;  // of its bytes
  uint64_t size = 0;
  std::string beginning = {};  // of its bytes: at most 15, for which a text takes no memory of its own
};

/// The files in an archive, in its order; folders and devices are left out. Reads the headers, and the first bytes behind them. Throws
/// IoError with the place of what is damaged or cut off, and for what would leave out a file without a word: a link, a sparse file, an
/// archive behind another one.
std::vector<TarMember> members_of_tar(const InputFile& file);

}  // namespace tessera::vision
