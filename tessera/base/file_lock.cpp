#include "tessera/base/file_lock.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>

namespace tessera {

LockedFile open_locked(const std::filesystem::path& path, int flags) {
  for (;;) {
    Fd file(::open(path.c_str(), flags | O_CREAT | O_CLOEXEC, 0666));
    if (!file) return {};
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 0, .l_pid = 0};
    if (::fcntl(file.get(), F_OFD_SETLK, &whole) != 0) {
      const bool held = errno == EAGAIN || errno == EACCES;
      return {.file = std::move(file), .state = held ? LockedFile::State::Held : LockedFile::State::NotPossible};
    }
    if (is_at(file, path)) return {.file = std::move(file), .state = LockedFile::State::Taken};
    // Its last owner has just removed or renamed it.
  }
}

bool is_at(const Fd& file, const std::filesystem::path& path) {
  struct stat own = {}, there = {};
  return ::fstat(file.get(), &own) == 0 && ::stat(path.c_str(), &there) == 0 && own.st_dev == there.st_dev && own.st_ino == there.st_ino;
}

}  // namespace tessera
