#include "tessera/base/new_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "tessera/base/error.h"

namespace tessera {
namespace {

[[noreturn]] void fail(const char* what, const std::filesystem::path& path) {
  throw IoError(fmt::format("can't {} {}: {}", what, path.string(), std::strerror(errno)));
}

}  // namespace

NewFile::NewFile(std::filesystem::path path) : path_(std::move(path)), part_(path_.string() + ".part") {
  fd_ = Fd(::open(part_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!fd_) fail("create", part_);
}

NewFile::~NewFile() {
  if (fd_) ::unlink(part_.c_str());
}

void NewFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const auto count = ::write(fd_.get(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail("write", part_);
    bytes = bytes.subspan(static_cast<size_t>(count));
  }
}

void NewFile::commit() {
  // Some file systems find out only now that there is no room.
  if (::fsync(fd_.get()) != 0) fail("write", part_);
  if (::rename(part_.c_str(), path_.c_str()) != 0) fail("give its final name to", part_);
  fd_ = Fd();
  sync_folder(path_.parent_path());
}

void sync_folder(const std::filesystem::path& folder) {
  const auto path = folder.empty() ? std::filesystem::path(".") : folder;
  const Fd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) fail("open the folder", path);
  // Some network file systems know no such thing for folders.
  if (::fsync(fd.get()) != 0 && errno != EINVAL && errno != ENOTSUP) fail("write the folder", path);
}

}  // namespace tessera
