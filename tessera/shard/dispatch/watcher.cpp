#include "tessera/shard/dispatch/watcher.h"

#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <memory>
#include <string_view>
#include <thread>

#include "tessera/base/compat.h"
#include "tessera/base/paging_key.h"

namespace tessera {
namespace {

// The watch is kept in debug info, because the autograd engine passes debug info, but not thread-local variables, to the threads that run a
// backward pass for a device.
constexpr std::string_view kName = "tessera::Watcher";
constexpr auto kKind = compat::debug_info_kind(kName);

/// The keys of this thread, with the paging key included for all operators if a watcher is set, else only for operators whose operands have
/// it.
c10::impl::LocalDispatchKeySet keys_for(const Watcher* watcher) {
  auto keys = c10::impl::tls_local_dispatch_key_set();
  keys.included_ = watcher != nullptr ? keys.included_.add(kPagingKey) : keys.included_.remove(kPagingKey);
  if (watcher != nullptr) keys.excluded_ = keys.excluded_.remove(kPagingKey);
  return keys;
}

}  // namespace

struct Watching::Watched final : c10::DebugInfoBase {
  explicit Watched(Watcher* by) : watcher(by) {}
  static std::shared_ptr<Watched> by(Watcher* watcher) {
    static const auto nobody = std::make_shared<Watched>(nullptr);  // one shared object, because each operator in a segment needs it
    return watcher == nullptr ? nobody : std::make_shared<Watched>(watcher);
  }

  /// The watch of this thread. Returns null in tasks that the program has started, although they inherit the watch: they run while the
  /// watched thread continues.
  static Watched* current() {
    // A shortcut, because every operator asks, and nearly always nobody watches.
    if (in_process.load(std::memory_order_relaxed) == 0) return nullptr;
    auto* const watched = static_cast<Watched*>(c10::ThreadLocalDebugInfo::get(kKind));
    if (watched == nullptr) return nullptr;
    return watched->thread == std::this_thread::get_id() || torch::autograd::get_current_graph_task_id() != -1 ? watched : nullptr;
  }

  static inline std::atomic<int> in_process = 0;  // number of watches of all threads
  std::recursive_mutex turns;
  std::atomic<Watcher*> watcher;  // null once the watch is over, because a task may keep this object longer
  const std::thread::id thread = std::this_thread::get_id();
};

Watcher* Watcher::current() {
  const auto* const watched = Watching::Watched::current();
  return watched == nullptr ? nullptr : watched->watcher.load();
}

Watcher::Turn::Turn() {
  auto* const watched = Watching::Watched::current();
  if (watched == nullptr || watched->watcher == nullptr) return;
  lock_ = std::unique_lock(watched->turns);
  watcher_ = watched->watcher;
}

Watching::Watching(Watcher* watcher) : watched_(Watched::by(watcher)), carried_(kKind, watched_), keys_(keys_for(watcher)) {
  Watched::in_process++;
}

/// Waits for the turns of other threads: a pass that has failed in one thread may still run in another.
Watching::~Watching() {
  const std::lock_guard lock(watched_->turns);
  watched_->watcher = nullptr;
  Watched::in_process--;
}

}  // namespace tessera
