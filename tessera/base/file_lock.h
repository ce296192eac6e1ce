// Locks of open files: they end with the last process that has the file open, and network file systems know them too.
#pragma once

#include <filesystem>

#include "tessera/base/fd.h"

namespace tessera {

/// Locks a file that is open for writing, without waiting. If it returns false, errno says why: EAGAIN or EACCES if somebody else has the
/// lock, another value if the file system has no locks.
bool take_lock(const Fd& file);

/// Whether the path still leads to the open file: the last owner of its lock may have removed or renamed it.
bool is_at(const Fd& file, const std::filesystem::path& path);

}  // namespace tessera
