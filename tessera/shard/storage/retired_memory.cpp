#include "tessera/shard/storage/retired_memory.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

namespace tessera {
namespace {

struct Retired {
  Event last_use;
  std::shared_ptr<at::DataPtr> memory;
};

struct List {
  std::mutex mutex;
  std::vector<Retired> entries;
};

/// Never destroyed, because tensors in static storage may be released at any time after main.
List& list() {
  static auto* const all = new List;
  return *all;
}

}  // namespace

void retire(std::shared_ptr<at::DataPtr> memory, Event last_use) {
  if (last_use.passed()) return;
  {
    const std::lock_guard lock(list().mutex);
    list().entries.push_back({.last_use = std::move(last_use), .memory = std::move(memory)});
  }
  free_retired();
}

size_t free_retired() {
  std::vector<Retired> passed;  // declared before the lock, so that it is freed after the unlock: allocators may take locks of their own
  const std::lock_guard lock(list().mutex);
  auto& entries = list().entries;
  const auto first_passed = std::stable_partition(entries.begin(), entries.end(), [](const Retired& each) { return !each.last_use.passed(); });
  passed.assign(std::make_move_iterator(first_passed), std::make_move_iterator(entries.end()));
  entries.erase(first_passed, entries.end());
  return entries.size();
}

}  // namespace tessera
