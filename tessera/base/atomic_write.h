// Files and folders that appear under their names only when they are complete.
#pragma once

#include <filesystem>
#include <span>

#include "tessera/base/fd.h"

namespace tessera {

/// PATH.part, the name that a file or folder has until it is complete.
std::filesystem::path unfinished_path(const std::filesystem::path& path);

/// Written under PATH.part, which takes the place of PATH on commit() and is removed without it. Every failure is an IoError.
class NewFile {
 public:
  explicit NewFile(std::filesystem::path path);
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;
  ~NewFile();

  void write(std::span<const std::byte> bytes);
  /// When it returns, a loss of power does no harm any more.
  void commit();

 private:
  std::filesystem::path path_, part_;
  Fd fd_;
};

/// The same for a folder, which is filled under PATH.part; it takes no other's place, so there must be no PATH yet.
class NewFolder {
 public:
  /// What a process that was killed has left under PATH.part is removed.
  explicit NewFolder(std::filesystem::path path);
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;
  ~NewFolder();

  void commit();
  /// PATH.part stays where it is, since others may still be writing into it.
  void abandon() { pending_ = false; }

 private:
  std::filesystem::path path_, part_;
  bool pending_ = true;
};

}  // namespace tessera
