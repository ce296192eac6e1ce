// Locks of open files: they end with the last process that has the file open, and network file systems know them too.
#pragma once

#include <filesystem>

#include "tessera/base/fd.h"

namespace tessera {

struct LockedFile {
  enum class State { Taken, Held, NotPossible };  // held by somebody else; not possible where the file system has no locks

  Fd file;  // not open if the file can't be opened
  State state = State::NotPossible;
};

/// Opens a file, or creates it, and locks it without waiting. `flags` are those of open(). If the file is not open or a lock not possible,
/// errno says why.
LockedFile open_locked(const std::filesystem::path& path, int flags);

/// Whether the path still leads to the open file: the last owner of its lock may have removed or renamed it.
bool is_at(const Fd& file, const std::filesystem::path& path);

}  // namespace tessera
