#include "tessera/shard/dispatch/watcher.h"

#include <utility>

#include "tessera/base/paging_key.h"

namespace tessera {
namespace {

thread_local Watcher* watcher_now = nullptr;

/// The keys of this thread, with the paging key for all operators or only for those whose operands have it.
c10::impl::LocalDispatchKeySet keys_for(const Watcher* watcher) {
  auto keys = c10::impl::tls_local_dispatch_key_set();
  keys.included_ = watcher != nullptr ? keys.included_.add(kPagingKey) : keys.included_.remove(kPagingKey);
  if (watcher != nullptr) keys.excluded_ = keys.excluded_.remove(kPagingKey);
  return keys;
}

}  // namespace

Watcher* Watcher::current() {
  return watcher_now;
}

Watching::Watching(Watcher* watcher) : outer_(std::exchange(watcher_now, watcher)), keys_(keys_for(watcher)) {}

Watching::~Watching() {
  watcher_now = outer_;
}

}  // namespace tessera
