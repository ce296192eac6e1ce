// Locks on open files. A lock is released when its owner closes the file or dies; network file systems support such locks, too. A NamedLock
// also says who holds it.
#pragma once

#include <filesystem>
#include <string>

#include "tessera/base/fd.h"

namespace tessera {

struct LockedFile {
  enum class State { Taken, Held, NotPossible };  // Held: by another owner; NotPossible: the file system has no locks

  Fd file;  // not open if opening has failed
  State state = State::NotPossible;
};

/// Opens a file, or creates it, and locks it without waiting. `flags` are those of open(). If opening or locking fails, errno says why.
LockedFile open_locked(const std::filesystem::path& path, int flags);

/// Whether the path still leads to the open file: the last owner of its lock may have removed or renamed it.
bool is_at(const Fd& file, const std::filesystem::path& path);

/// A lock on a file that contains the name of the lock's owner. The constructor tries once to take the lock, without waiting. The
/// destructor removes the file; a file that a killed process has left is not locked.
class NamedLock {
 public:
  /// Throws IoError if the file can't be made.
  explicit NamedLock(std::filesystem::path path);
  NamedLock(NamedLock&& other) noexcept = default;
  NamedLock& operator=(NamedLock&&) = delete;
  ~NamedLock();

  LockedFile::State state() const { return state_; }
  /// The name of the holder: this process or, if the state is Held, another process.
  const std::string& owner() const { return owner_; }

 private:
  std::filesystem::path path_;
  LockedFile::State state_ = LockedFile::State::NotPossible;
  Fd file_;  // open unless another owner holds the lock
  std::string owner_;
};

/// Takes the lock PATH.lock of a file or folder that one job writes at a time. Throws IoError if another job has it. On file systems
/// without locks, it does not keep other jobs away.
NamedLock lock_place(const std::filesystem::path& path);

}  // namespace tessera
