// Files and folders that appear under their names only when they are complete.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "tessera/base/fd.h"
#include "tessera/base/file_lock.h"
#include "tessera/base/no_copy.h"

namespace tessera {

/// Returns PATH.part, the name of a file or folder until it is complete. In a Storage, where nothing can be renamed, returns PATH itself: a
/// file appears only when it is complete, and a folder is complete when it has the file that is written last.
std::filesystem::path unfinished_path(const std::filesystem::path& path);

/// A file that is written as PATH.part. commit() renames it to PATH and replaces a file of that name; without commit() the destructor
/// removes it. If PATH is a symbolic link, its target is replaced. A second writer of the same PATH, in any thread or process, is refused.
/// Every failure is an IoError.
class NewFile : NoCopy {
 public:
  explicit NewFile(std::filesystem::path path);
  ~NewFile();

  /// The name of the file until commit().
  const std::filesystem::path& part() const { return part_; }
  void write(std::span<const std::byte> bytes);
  /// Leaves room for `bytes` more bytes, which an UnfinishedFile writes.
  void reserve(uint64_t bytes);
  /// Closes the file until overwrite() or commit() opens it again, because a process can't have many files open at once. The file stays
  /// unlocked from then on.
  void set_aside();
  /// Replaces bytes that have been written.
  void overwrite(uint64_t offset, std::span<const std::byte> bytes);
  /// Syncs to disk: once it has returned, the file survives a loss of power.
  void commit();
  /// Whether nobody need read the file again to know that it is as written. Call it after commit().
  bool is_verified() const;

 private:
  class Uploading;
  /// Opens the file again if it was set aside.
  void take_up();

  std::filesystem::path path_, part_;
  Fd fd_;
  bool is_aside_ = false;
  std::unique_ptr<Uploading> uploading_;  // set for a file in a Storage; then fd_ is not open
};

/// Writes a file with this text, and replaces a file of that name.
void write_text(const std::filesystem::path& path, std::string_view text);

/// Writes into the file of a NewFile that another process or object has made.
class UnfinishedFile {
 public:
  /// `part` is NewFile::part().
  explicit UnfinishedFile(std::filesystem::path part);

  void write(uint64_t offset, std::span<const std::byte> bytes);
  /// Syncs to disk.
  void close();

 private:
  std::filesystem::path part_;
  Fd fd_;
};

/// A folder that is filled under another name. commit() renames it to PATH; without commit() the destructor removes it. PATH must not exist
/// yet, and no other job may be writing it: the lock PATH.lock is held meanwhile. Every failure is an IoError.
class NewFolder : NoCopy {
 public:
  explicit NewFolder(const std::filesystem::path& path) : NewFolder(path, unfinished_path(path), {}) {}
  /// Removes a folder `part` that a killed process has left. `part` may be PATH itself where folders can't be renamed. Takes the lock
  /// unless the caller passes it.
  NewFolder(std::filesystem::path path, std::filesystem::path part, std::optional<NamedLock> lock);
  ~NewFolder();

  void commit();
  /// Leaves the unfinished folder where it is, because other ranks may still write into it.
  void abandon() { pending_ = false; }

 private:
  std::filesystem::path path_, part_;
  std::optional<NamedLock> lock_;  // unset in a Storage
  Fd made_;                        // the open folder, to notice if somebody else puts another one in its place
  bool pending_ = true;
};

}  // namespace tessera
