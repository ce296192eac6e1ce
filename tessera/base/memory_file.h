// A file in memory (memfd), which disappears with the process that made it.
#pragma once

#include <sys/types.h>

#include <string>

#include "tessera/base/fd.h"

namespace tessera {

class MemoryFile {
 public:
  /// `name` is what /proc shows of it. Throws IoError.
  explicit MemoryFile(const char* name);

  /// Other processes open it by this path, so it also works under wrappers that close inherited descriptors.
  std::string path() const;

 private:
  Fd file_;
};

}  // namespace tessera
