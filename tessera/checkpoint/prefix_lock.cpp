#include "tessera/checkpoint/prefix_lock.h"

#include <fmt/format.h>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/storage.h"
#include "tessera/checkpoint/step_folders.h"
#include "tessera/comm/groups/all_or_none.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

NamedLock take(const fs::path& path, const std::string& prefix) {
  NamedLock lock(path);
  if (lock.state() == LockedFile::State::Held) {
    throw ConfigError("another job saves its checkpoints as {} ({}, says {}); give this job another prefix, or stop the other job", prefix,
                      lock.owner(), path);
  }
  if (lock.state() == LockedFile::State::NotPossible)
    log(LogLevel::Warning, "{} can't be locked, so nothing keeps a second job from saving there", path);
  return lock;
}

}  // namespace

PrefixLock::PrefixLock(const fs::path& prefix, const Communicator& world) {
  AllOrNone step;
  step.attempt([&] {
    if (!world.is_first()) return;
    expect_usable(prefix);
    if (object_path(prefix))
      return log(LogLevel::Warning,
                 fmt::format("{} is in a store, which can't be locked, so nothing keeps a second job from saving there", prefix.string()));
    lock_.emplace(take(prefix.string() + ".lock", prefix.string()));
  });
  step.expect_all(world, {.unit = "checkpoint"}, fmt::format("can't save as {}", prefix.string()));
}

}  // namespace tessera::checkpoint
