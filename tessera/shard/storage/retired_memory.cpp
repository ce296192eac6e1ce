#include "tessera/shard/storage/retired_memory.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

namespace tessera {
namespace {

struct Retired {
  Event last_use;
  size_t bytes;
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

void retire(std::shared_ptr<at::DataPtr> memory, size_t bytes, Event last_use) {
  if (last_use.passed()) return;
  {
    const std::lock_guard lock(list().mutex);
    list().entries.push_back({.last_use = std::move(last_use), .bytes = bytes, .memory = std::move(memory)});
  }
  free_retired();
}

std::shared_ptr<at::DataPtr> reuse_retired(size_t bytes, c10::Device device) {
  if (device.is_cpu()) return nullptr;
  const std::lock_guard lock(list().mutex);
  auto& entries = list().entries;
  // A view may still keep the memory that its storage has released.
  const auto found = std::ranges::find_if(
      entries, [&](const Retired& each) { return each.bytes == bytes && each.memory->device() == device && each.memory.use_count() == 1; });
  if (found == entries.end()) return nullptr;
  found->last_use.block();
  auto memory = std::move(found->memory);
  entries.erase(found);
  return memory;
}

size_t free_retired() {
  std::vector<Retired> passed;  // declared before the lock, so that it is freed after the unlock: allocators may take locks of their own
  const std::lock_guard lock(list().mutex);
  auto& entries = list().entries;
  const auto first_passed =
      std::stable_partition(entries.begin(), entries.end(), [](const Retired& each) { return !each.last_use.passed(); });
  passed.assign(std::make_move_iterator(first_passed), std::make_move_iterator(entries.end()));
  entries.erase(first_passed, entries.end());
  return entries.size();
}

}  // namespace tessera
