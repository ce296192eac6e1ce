#include "tessera/base/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/storage.h"

namespace tessera {

InputFile::InputFile(std::filesystem::path path) : path_(std::move(path)) {
  if (const auto there = object_path(path_)) {
    const auto size = there->storage->size(there->name);
    if (!size) throw IoError("can't open {}: there is no such object", path_);
    size_ = *size;
    read_ = [there = *there](void* to, uint64_t count, uint64_t offset) {
      there.storage->read(there.name, offset, {static_cast<std::byte*>(to), count});
    };
    return;
  }
  // Without O_NONBLOCK, a pipe without a writer would keep us waiting.
  fd_ = Fd(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status = {};
  if (!fd_ || ::fstat(fd_.get(), &status) != 0) throw IoError("can't open {}: {}", path_, why_not_opened(path_, errno));
  if (!S_ISREG(status.st_mode)) throw IoError("{} is not a file", path_);
  size_ = static_cast<uint64_t>(status.st_size);
}

void InputFile::read(void* to, uint64_t count, uint64_t offset) const {
  if (read_) return read_(to, count, offset);
  auto* next = static_cast<char*>(to);
  while (count > 0) {
    const auto got = ::pread(fd_.get(), next, count, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw IoError("can't read {}: {}", path_, std::strerror(errno));
    if (got == 0) throw IoError("{} has become shorter while it was read: it ends at byte {}", path_, offset);
    next += got;
    count -= static_cast<uint64_t>(got);
    offset += static_cast<uint64_t>(got);
  }
}

std::string InputFile::read_first(uint64_t count) const {
  std::string bytes(count, '\0');
  read(bytes.data(), count, 0);
  return bytes;
}

}  // namespace tessera
