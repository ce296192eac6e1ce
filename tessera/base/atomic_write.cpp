#include "tessera/base/atomic_write.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/file_lock.h"
#include "tessera/base/folder.h"
#include "tessera/base/input_file.h"
#include "tessera/base/storage.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const char* what, const fs::path& path) {
  throw IoError("can't {} {}: {}", what, path, why_unwritable(errno));
}

/// Syncs the names in a folder to disk, after files in it were created, renamed or removed.
void sync_folder(const fs::path& folder) {
  const auto path = folder.empty() ? fs::path(".") : folder;
  const Fd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) fail("open the folder", path);
  // Some network file systems can't sync folders.
  if (::fsync(fd.get()) != 0 && errno != EINVAL && errno != ENOTSUP) fail("write the folder", path);
}

void write_at(int file, const fs::path& path, uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const auto count = ::pwrite(file, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail("write", path);
    bytes = bytes.subspan(static_cast<size_t>(count));
    offset += static_cast<uint64_t>(count);
  }
}

void give_name(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) fail("give its final name to", from);
}

/// Syncs the parent folder, so that the new name of a file or folder survives a loss of power. If that fails, the name exists all the same.
void make_last(const fs::path& path) {
  try {
    sync_folder(path.parent_path());
  } catch (const IoError& error) {
    throw IoError("{}; {} exists, but may not survive a loss of power", error.what(), path);
  }
}

/// Returns the path, or its target if it is a symbolic link. Throws IoError if something else than a regular file is there, such as a
/// device, because a write would replace it.
fs::path target_of(fs::path path) {
  if (object_path(path)) return path;
  std::error_code none;
  if (fs::is_symlink(path, none)) path = fs::weakly_canonical(path);
  const auto status = fs::status(path, none);
  if (!fs::exists(status) || fs::is_regular_file(status)) return path;
  throw IoError("{} is not a regular file, so it can't be replaced", path);
}

}  // namespace

fs::path unfinished_path(const fs::path& path) {
  return object_path(path) ? path : fs::path(path.string() + ".part");
}

/// Collects bytes into parts and uploads each part when it is full. Part 0 is kept until the end, so that it can be overwritten.
class NewFile::Uploading {
 public:
  Uploading(std::unique_ptr<Upload> upload, fs::path path) : upload_(std::move(upload)), path_(std::move(path)) {}

  void write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      auto& part = number_ == 0 ? first_ : next_;
      // Only part 0 can be overwritten, so it takes all bytes of the first write().
      const auto room = part.empty() && number_ == 0 ? std::max(bytes.size(), upload_part(0)) : upload_part(number_) - part.size();
      const auto count = std::min(bytes.size(), room);
      part.insert(part.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(count));
      bytes = bytes.subspan(count);
      if (part.size() >= upload_part(number_)) end_part();
    }
  }

  void overwrite(uint64_t offset, std::span<const std::byte> bytes) {
    if (offset + bytes.size() > first_.size()) refuse("it must be overwritten in the middle");
    std::ranges::copy(bytes, first_.begin() + static_cast<std::ptrdiff_t>(offset));
  }

  void complete() {
    if (!next_.empty()) end_part();
    upload_->write(0, first_);
    upload_->complete();
  }

  bool is_verified() const { return upload_->is_verified(); }

  [[noreturn]] void refuse(const char* why) const {
    throw IoError("{} can't be in an object store, because {}; save in Tessera's format there, or on a disk", path_, why);
  }

 private:
  void end_part() {
    if (number_ > 0) upload_->write(number_, next_);
    next_.clear();
    number_++;
  }

  const std::unique_ptr<Upload> upload_;
  const fs::path path_;
  std::vector<std::byte> first_, next_;
  int number_ = 0;  // the part that is being filled
};

NewFile::NewFile(fs::path path) : path_(target_of(std::move(path))), part_(unfinished_path(path_)) {
  if (const auto there = object_path(path_)) {
    uploading_ = std::make_unique<Uploading>(there->storage->create(there->name), path_);
    return;
  }
  auto part = open_locked(part_, O_WRONLY);
  if (!part.file) fail("create", path_);
  // On file systems without locks, a second writer gets no error here.
  if (part.state == LockedFile::State::Held) {
    throw IoError("somebody else is writing {} now; if all ranks make this call, make it on one rank", path_);
  }
  fd_ = std::move(part.file);
  if (::ftruncate(fd_.get(), 0) == 0) return;
  const int reason = errno;
  ::unlink(part_.c_str());
  errno = reason;
  fail("write", part_);
}

NewFile::~NewFile() {
  if (fd_ || is_aside_) ::unlink(part_.c_str());
}

void NewFile::write(std::span<const std::byte> bytes) {
  if (uploading_) return uploading_->write(bytes);
  while (!bytes.empty()) {
    const auto count = ::write(fd_.get(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail("write", part_);
    bytes = bytes.subspan(static_cast<size_t>(count));
  }
}

void NewFile::reserve(uint64_t bytes) {
  if (uploading_) uploading_->refuse("several ranks write into it");
  const auto end = ::lseek(fd_.get(), static_cast<off_t>(bytes), SEEK_CUR);
  if (end < 0 || ::ftruncate(fd_.get(), end) != 0) fail("write", part_);
}

void NewFile::set_aside() {
  if (uploading_) return;
  fd_ = Fd();
  is_aside_ = true;
}

void NewFile::take_up() {
  if (!is_aside_) return;
  fd_ = Fd(::open(part_.c_str(), O_WRONLY | O_CLOEXEC));
  if (!fd_) fail("write", part_);
  is_aside_ = false;
}

void NewFile::overwrite(uint64_t offset, std::span<const std::byte> bytes) {
  if (uploading_) return uploading_->overwrite(offset, bytes);
  take_up();
  write_at(fd_.get(), part_, offset, bytes);
}

void NewFile::commit() {
  if (uploading_) return uploading_->complete();
  take_up();
  // Some file systems only notice here that the disk is full.
  if (::fsync(fd_.get()) != 0) fail("write", part_);
  if (!is_at(fd_, part_)) {
    fd_ = Fd();
    throw IoError("{} is not the file that was written: somebody has removed it, or writes there, too", part_);
  }
  give_name(part_, path_);
  fd_ = Fd();
  make_last(path_);
}

bool NewFile::is_verified() const {
  return !uploading_ || uploading_->is_verified();
}

void write_text(const fs::path& path, std::string_view text) {
  NewFile file(path);
  file.write(std::as_bytes(std::span(text)));
  file.commit();
  // A Storage is code of the program, so the stored bytes are read back and compared.
  if (object_path(path) && InputFile(path).read_all() != text)
    throw IoError("{} was written, but the store gives other bytes back; save again", path);
}

UnfinishedFile::UnfinishedFile(fs::path part) : part_(std::move(part)), fd_(::open(part_.c_str(), O_WRONLY | O_CLOEXEC)) {
  if (!fd_) fail("write", part_);
}

void UnfinishedFile::write(uint64_t offset, std::span<const std::byte> bytes) {
  write_at(fd_.get(), part_, offset, bytes);
}

void UnfinishedFile::close() {
  if (::fsync(fd_.get()) != 0) fail("write", part_);
  fd_ = Fd();
}

NewFolder::NewFolder(fs::path path, fs::path part, std::optional<NamedLock> lock)
    : path_(std::move(path)), part_(std::move(part)), lock_(std::move(lock)) {
  const auto refuse_if = [&](bool exists) {
    if (exists) throw IoError("there is a {} already; save under another name, or remove it", path_);
  };
  if (object_path(path_)) {
    refuse_if(is_there(path_));
    return;
  }
  if (!lock_) lock_.emplace(lock_place(path_));
  std::error_code error;
  const auto status = fs::symlink_status(path_, error);
  refuse_if(fs::exists(status));
  if (status.type() != fs::file_type::not_found) throw IoError("can't look at {}: {}", path_, error.message());
  error.clear();
  fs::remove_all(part_, error);
  if (!error) fs::create_directories(part_, error);
  if (error) throw IoError("can't create the folder {}: {}", path_, why_unwritable(error.value()));
  made_ = Fd(::open(part_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!made_) fail("open the folder", part_);
}

NewFolder::~NewFolder() {
  try {
    if (pending_ && (!made_ || is_at(made_, part_))) remove_tree(part_);
  } catch (...) {  // the folder stays; it is incomplete, so it does not count as a checkpoint
  }
}

void NewFolder::commit() {
  if (object_path(path_)) {
    pending_ = false;
    return;
  }
  if (!is_at(made_, part_)) {
    throw IoError("{} is not the folder that this save has made: somebody has removed it, or another job writes there, too", part_);
  }
  sync_folder(part_);
  if (part_ != path_) give_name(part_, path_);
  pending_ = false;
  make_last(path_);
}

}  // namespace tessera
