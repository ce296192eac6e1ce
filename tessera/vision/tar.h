// The places of files in tar archives: reads the headers of ustar, GNU's long names and the records of pax.
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

/// Returns the files in an archive, in its order, without folders and devices. Reads the headers and the first bytes after them. Throws
/// IoError with the place of the damage if the archive is damaged or cut off, and for anything that would silently leave out a file: a
/// link, a sparse file, an archive appended to another one.
std::vector<TarMember> members_of_tar(const InputFile& file);

}  // namespace tessera::vision
