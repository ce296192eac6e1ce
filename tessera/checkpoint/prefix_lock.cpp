#include "tessera/checkpoint/prefix_lock.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <ctime>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/file_lock.h"
#include "tessera/base/folder.h"
#include "tessera/base/log.h"
#include "tessera/base/storage.h"
#include "tessera/checkpoint/step_folders.h"
#include "tessera/comm/groups/all_or_none.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

std::string own_name() {
  std::array<char, HOST_NAME_MAX + 1> host{};
  ::gethostname(host.data(), HOST_NAME_MAX);
  const auto now = std::time(nullptr);
  std::tm parts{};
  std::array<char, 32> since{};
  std::strftime(since.data(), since.size(), "%F %T", ::localtime_r(&now, &parts));
  return fmt::format("process {} on {}, since {}", ::getpid(), host.data(), since.data());
}

/// What the owner has written. It may just have taken the lock, and be about to write.
std::string owner_in(const Fd& file) {
  std::array<char, 512> text{};
  for (int i = 0; i < 100; i++) {
    const auto count = ::pread(file.get(), text.data(), text.size(), 0);
    if (count > 0) return {text.data(), static_cast<size_t>(count)};
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return "a process that has not written its name";
}

Fd take(const fs::path& path, const std::string& prefix) {
  auto [file, state] = open_locked(path, O_RDWR | O_NOFOLLOW);
  if (!file) throw IoError(fmt::format("can't create {}: {}", path.string(), why_unwritable(errno)));
  if (state == LockedFile::State::Held) {
    throw ConfigError(fmt::format("another job saves its checkpoints as {} ({}, says {}); give this one another prefix, or stop that one",
                                  prefix, owner_in(file), path.string()));
  }
  if (state == LockedFile::State::NotPossible) {
    log(LogLevel::Warning,
        fmt::format("{} can't be locked ({}), so nothing keeps a second job from saving there", path.string(), std::strerror(errno)));
    return std::move(file);
  }
  const auto text = own_name();
  if (::ftruncate(file.get(), 0) != 0 || ::pwrite(file.get(), text.data(), text.size(), 0) != static_cast<ssize_t>(text.size())) {
    const int reason = errno;
    ::unlink(path.c_str());
    throw IoError(fmt::format("can't write {}: {}", path.string(), std::strerror(reason)));
  }
  return std::move(file);
}

}  // namespace

PrefixLock::PrefixLock(const fs::path& prefix, const Communicator& world) : path_(prefix.string() + ".lock") {
  AllOrNone step;
  step.attempt([&] {
    if (!world.is_first()) return;
    expect_usable(prefix);
    if (stored(prefix))
      return log(LogLevel::Warning,
                 fmt::format("{} is in a store, which can't be locked, so nothing keeps a second job from saving there", prefix.string()));
    file_ = take(path_, prefix.string());
  });
  step.expect_all(world, {.unit = "checkpoint"}, fmt::format("can't save as {}", prefix.string()));
}

PrefixLock::~PrefixLock() {
  if (file_ && is_at(file_, path_)) ::unlink(path_.c_str());  // before the lock ends, so that nobody else has it yet
}

}  // namespace tessera::checkpoint
