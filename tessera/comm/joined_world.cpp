#include "tessera/comm/joined_world.h"

#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/base/error.h"

namespace tessera {
namespace {

/// A world that ends when the program lets go of it, so that it does not outlive main().
struct JoinedWorld {
  std::weak_ptr<Group> group = {};
  std::chrono::milliseconds limit = {};

  std::optional<Communicator> get() const {
    if (auto own = group.lock()) return Communicator(std::move(own), limit);
    return std::nullopt;
  }
};

thread_local JoinedWorld joined_by_thread;

struct JoinedWorlds {
  std::mutex mutex;
  std::vector<JoinedWorld> all;
};

JoinedWorlds& joined_by_process() {
  static auto& worlds = *new JoinedWorlds;  // never destroyed, because threads may use it while the process ends
  return worlds;
}

}  // namespace

Communicator remember_joined(Communicator world) {
  joined_by_thread = {.group = world.group(), .limit = world.limit()};
  auto& [mutex, all] = joined_by_process();
  const std::lock_guard lock(mutex);
  std::erase_if(all, [](const JoinedWorld& each) { return each.group.expired(); });
  all.push_back(joined_by_thread);
  return world;
}

Communicator joined_world() {
  if (auto own = joined_by_thread.get()) return *own;
  std::vector<Communicator> found;  // before the lock, so that a world whose last holder this is ends without it
  auto& [mutex, all] = joined_by_process();
  const std::lock_guard lock(mutex);
  for (const auto& each : all) {
    if (auto world = each.get()) found.push_back(*world);
  }
  if (found.empty()) {
    throw UsageError(
        "no mesh was given, and no world that tessera::init returned exists; call init first and keep the world that it returns, or pass a "
        "world, as {{.mesh = world}}");
  }
  const auto rank_of = [](const Communicator& world) { return world.local_ranks().front(); };
  for (const auto& world : found) {
    if (rank_of(world) == rank_of(found.back())) continue;
    throw UsageError(
        "no mesh was given, and threads of this process have joined as ranks {} and {}; pass the world of this thread's rank, as {{.mesh = "
        "world}}",
        rank_of(world), rank_of(found.back()));
  }
  return found.back();
}

}  // namespace tessera
