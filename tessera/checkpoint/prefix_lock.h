// Keeps two jobs from saving under one prefix.
#pragma once

#include <filesystem>
#include <optional>

#include "tessera/base/file_lock.h"
#include "tessera/comm/communicator.h"

namespace tessera::checkpoint {

/// While a PrefixLock exists, no other job can have a lock for the same prefix. The lock is held on the file PREFIX.lock, which names the
/// owner, and is released when the process of rank 0 ends, even by a crash.
class PrefixLock {
 public:
  /// Throws UsageError if the prefix is a folder, ConfigError if another job holds the lock, and IoError if nothing can be written there.
  /// If the file system has no locks, only logs a warning. Collective.
  PrefixLock(const std::filesystem::path& prefix, const Communicator& world);
  PrefixLock(PrefixLock&&) = delete;

 private:
  std::optional<NamedLock> lock_;  // set only in the process of rank 0
};

}  // namespace tessera::checkpoint
