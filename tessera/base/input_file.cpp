#include "tessera/base/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/storage.h"

namespace tessera {
namespace {

/// Reads an object ahead, in pieces that grow, while it is read from front to back: a request takes as long as megabytes do.
class ReadAhead {
 public:
  ReadAhead(ObjectPath object, uint64_t size) : object_(std::move(object)), size_(size) {}

  void read(void* to, uint64_t count, uint64_t offset) {
    std::unique_lock lock(mutex_);
    const auto before = std::exchange(end_, offset + count);
    const bool is_here = offset >= begin_ && offset + count <= begin_ + window_.size();
    const bool goes_on = offset >= before && offset - before < kMostAhead / 2 && count < kMostAhead && offset + count <= size_;
    if (!is_here && !goes_on) {
      lock.unlock();
      return object_.storage->read(object_.name, offset, {static_cast<std::byte*>(to), count});
    }
    if (!is_here) {
      std::vector<std::byte> next(std::max(count, std::min(ahead_, size_ - offset)));
      object_.storage->read(object_.name, offset, next);
      window_ = std::move(next);
      begin_ = offset;
      ahead_ = std::min(2 * ahead_, kMostAhead);
    }
    std::copy_n(window_.begin() + static_cast<std::ptrdiff_t>(offset - begin_), count, static_cast<std::byte*>(to));
  }

 private:
  static constexpr uint64_t kMostAhead = uint64_t{8} << 20;

  const ObjectPath object_;
  const uint64_t size_;
  std::mutex mutex_;
  std::vector<std::byte> window_;
  uint64_t begin_ = 0;  // of the window
  uint64_t end_ = 0;    // of the last read
  uint64_t ahead_ = uint64_t{64} << 10;
};

}  // namespace

InputFile::InputFile(std::filesystem::path path) : path_(std::move(path)) {
  if (const auto there = object_path(path_)) {
    const auto size = there->storage->size(there->name);
    if (!size) throw IoError("can't open {}: there is no such object", path_);
    size_ = *size;
    read_ = [reader = std::make_shared<ReadAhead>(*there, size_)](void* to, uint64_t count, uint64_t offset) {
      reader->read(to, count, offset);
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
