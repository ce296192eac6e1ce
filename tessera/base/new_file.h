// A file that appears under its name only when it is complete.
#pragma once

#include <filesystem>
#include <span>

#include "tessera/base/fd.h"

namespace tessera {

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

/// Makes lasting what was created, renamed or removed in the folder.
void sync_folder(const std::filesystem::path& folder);

}  // namespace tessera
