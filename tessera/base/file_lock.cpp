#include "tessera/base/file_lock.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/process.h"

namespace tessera {
namespace {

std::string own_name() {
  const auto now = std::time(nullptr);
  std::tm parts{};
  std::array<char, 32> since{};
  std::strftime(since.data(), since.size(), "%F %T", ::localtime_r(&now, &parts));
  return fmt::format("process {} on {}, since {}", ::getpid(), host_name(), since.data());
}

/// Reads the owner's name. Waits a moment for it, because an owner takes the lock before it writes its name.
std::string owner_in(const Fd& file) {
  std::array<char, 512> text{};
  for (int i = 0; i < 100; i++) {
    const auto count = ::pread(file.get(), text.data(), text.size(), 0);
    if (count > 0) return {text.data(), static_cast<size_t>(count)};
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return "a process that has not written its name";
}

}  // namespace

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
    // The last owner of the lock has just removed or renamed the file, so the loop opens the path again.
  }
}

bool is_at(const Fd& file, const std::filesystem::path& path) {
  struct stat own = {}, there = {};
  return ::fstat(file.get(), &own) == 0 && ::stat(path.c_str(), &there) == 0 && own.st_dev == there.st_dev && own.st_ino == there.st_ino;
}

NamedLock::NamedLock(std::filesystem::path path) : path_(std::move(path)) {
  auto [file, state] = open_locked(path_, O_RDWR | O_NOFOLLOW);
  if (!file) throw IoError("can't create {}: {}", path_, why_unwritable(errno));
  state_ = state;
  if (state == LockedFile::State::Held) {
    owner_ = owner_in(file);
    return;
  }
  owner_ = own_name();
  if (::ftruncate(file.get(), 0) != 0 || ::pwrite(file.get(), owner_.data(), owner_.size(), 0) != static_cast<ssize_t>(owner_.size())) {
    const int reason = errno;
    ::unlink(path_.c_str());
    throw IoError("can't write {}: {}", path_, std::strerror(reason));
  }
  file_ = std::move(file);
}

NamedLock::~NamedLock() {
  if (file_ && is_at(file_, path_)) ::unlink(path_.c_str());  // before ~Fd releases the lock and another owner takes the file
}

NamedLock lock_place(const std::filesystem::path& path) {
  const std::filesystem::path file = path.string() + ".lock";
  std::error_code error;
  if (file.has_parent_path()) std::filesystem::create_directories(file.parent_path(), error);
  if (error) throw IoError("can't create {}: {}", path, why_unwritable(error.value()));
  NamedLock lock(file);
  if (lock.state() == LockedFile::State::Held) {
    throw IoError(
        "another job is writing {} now ({}, says {}); wait for its end or write under another name; if all ranks "
        "make this call, make it on one rank",
        path, lock.owner(), file);
  }
  return lock;
}

}  // namespace tessera
