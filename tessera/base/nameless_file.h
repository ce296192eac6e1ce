// A file without a name, which is gone when it is closed.
#pragma once

#include <fcntl.h>
#include <stdlib.h>

#include <cerrno>
#include <filesystem>
#include <string>

#include "tessera/base/fd.h"

namespace tessera {

/// Empty, and errno says why, if there can be none in the folder.
inline Fd nameless_file(const std::filesystem::path& folder) {
  Fd file(::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (file || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return file;
  auto name = (folder / "tessera-XXXXXX").string();  // a file system that makes no such files
  file = Fd(::mkostemp(name.data(), O_CLOEXEC));
  if (file) ::unlink(name.c_str());
  return file;
}

}  // namespace tessera
