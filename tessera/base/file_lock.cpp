#include "tessera/base/file_lock.h"

#include <fcntl.h>
#include <sys/stat.h>

namespace tessera {

bool take_lock(const Fd& file) {
  struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 0, .l_pid = 0};
  return ::fcntl(file.get(), F_OFD_SETLK, &whole) == 0;
}

bool is_at(const Fd& file, const std::filesystem::path& path) {
  struct stat own = {}, there = {};
  return ::fstat(file.get(), &own) == 0 && ::stat(path.c_str(), &there) == 0 && own.st_dev == there.st_dev && own.st_ino == there.st_ino;
}

}  // namespace tessera
