#include "tessera/base/memory_file.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tessera/base/error.h"

namespace tessera {

MemoryFile::MemoryFile(const char* name) : file_(::memfd_create(name, MFD_CLOEXEC)) {
  if (!file_) throw IoError("can't make a file in memory for {}: {}", name, std::strerror(errno));
}

std::string MemoryFile::path() const {
  return fmt::format("/proc/{}/fd/{}", ::getpid(), file_.get());
}

}  // namespace tessera
