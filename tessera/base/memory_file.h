// A file in memory (memfd), which disappears with the process that made it.
#pragma once

#include <sys/types.h>

#include <string>

#include "tessera/base/fd.h"

namespace tessera {

class MemoryFile {
 public:
  /// /proc shows the file under `name`. Throws IoError.
  explicit MemoryFile(const char* name);

  /// Other processes open the file by this path, which also works under wrappers that close inherited descriptors.
  std::string path() const;

 private:
  Fd file_;
};

}  // namespace tessera
