#include "tessera/shard/storage/storage_tag.h"

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <mutex>
#include <utility>
#include <vector>

#include "tessera/base/compat.h"
#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/event.h"
#include "tessera/base/paging_key.h"
#include "tessera/comm/simulation.h"
#include "tessera/shard/storage/paged_tensor.h"

namespace tessera {

void (*TaggedStorage::on_raw_write)(const std::shared_ptr<Unit>& unit) = nullptr;

namespace {

/// Bytes that all unsharded parameters of this process take.
std::atomic<size_t> unsharded_bytes = 0;

struct UnshardedMemory : at::DataPtr {
  UnshardedMemory(at::DataPtr memory, size_t size) : DataPtr(std::move(memory)), bytes(size) { unsharded_bytes += bytes; }
  ~UnshardedMemory() { unsharded_bytes -= bytes; }
  UnshardedMemory(const UnshardedMemory&) = delete;
  UnshardedMemory& operator=(const UnshardedMemory&) = delete;

  const size_t bytes;
};

struct Retired {
  Event last_use;
  size_t bytes;
  MemoryPtr memory;
};

struct RetiredMemory {
  std::mutex mutex;
  std::vector<Retired> entries;
};

/// Never destroyed, because tensors in static storage may be released at any time after main.
RetiredMemory& retired() {
  static auto* const all = new RetiredMemory;
  return *all;
}

/// Keeps the memory until the event has passed.
void retire(MemoryPtr memory, size_t bytes, Event last_use) {
  if (last_use.passed()) return;
  {
    const std::lock_guard lock(retired().mutex);
    retired().entries.push_back({.last_use = std::move(last_use), .bytes = bytes, .memory = std::move(memory)});
  }
  free_retired();
}

/// Returns retired memory of this size, or null. Work that the calling thread queues next on its current stream runs after the last use of
/// the memory; the host waits for nothing. So the memory of whole units does not grow however far the host runs ahead of its device.
MemoryPtr reuse_retired(size_t bytes, c10::Device device) {
  if (device.is_cpu()) return nullptr;
  const std::lock_guard lock(retired().mutex);
  auto& entries = retired().entries;
  // A view may still keep the memory that its storage has released.
  const auto found = std::ranges::find_if(
      entries, [&](const Retired& each) { return each.bytes == bytes && each.memory->device() == device && each.memory.use_count() == 1; });
  if (found == entries.end()) return nullptr;
  found->last_use.block();
  auto memory = std::move(found->memory);
  entries.erase(found);
  return memory;
}

at::DataPtr allocate_or_explain(size_t bytes, c10::Device device, std::string_view unit) {
  try {
    return c10::GetAllocator(device.type())->allocate(bytes);
  } catch (const c10::OutOfMemoryError& error) {
    throw IoError(
        "{} has no room for {} bytes of unit '{}', while {} bytes of unsharded parameters are there. To need less, use smaller "
        "batches, segments (tessera::checkpoint_modules), more and smaller units, or max_live_units = 1. libtorch says: {}",
        device.str(), bytes, unit, unsharded_bytes.load(), error.what_without_backtrace());
  }
}

}  // namespace

size_t free_retired() {
  std::vector<Retired> passed;  // declared before the lock, so that it is freed after the unlock: allocators may take locks of their own
  const std::lock_guard lock(retired().mutex);
  auto& entries = retired().entries;
  const auto first_passed =
      std::stable_partition(entries.begin(), entries.end(), [](const Retired& each) { return !each.last_use.passed(); });
  passed.assign(std::make_move_iterator(first_passed), std::make_move_iterator(entries.end()));
  entries.erase(first_passed, entries.end());
  return entries.size();
}

MemoryPtr allocate_memory(size_t bytes, c10::Device device, std::string_view unit) {
  const MemoryScope scope(MemoryKind::Parameters);
  return std::make_shared<at::DataPtr>(allocate_or_explain(bytes, device, unit));
}

TaggedStorage::TaggedStorage(StorageTag content, size_t bytes, c10::Device device)
    : StorageImpl(use_byte_size_t(), bytes, at::DataPtr(nullptr, device), /*allocator=*/nullptr, /*resizable=*/false),
      tag(std::move(content)) {}

// Called when the last tensor of the storage is gone. Weak references, such as the unit's own, may remain.
void TaggedStorage::release_resources() {
  StorageImpl::release_resources();
  tag = {};
  memory_.reset();
}

void TaggedStorage::allocate(std::string_view unit) {
  if (auto memory = reuse_retired(nbytes(), device())) return adopt(std::move(memory));
  free_retired();  // so that the allocator can reuse memory whose last reader has finished
  const MemoryScope scope(tag.role == Role::Unsharded ? MemoryKind::Unsharded : MemoryKind::Gradients);
  auto memory = allocate_or_explain(nbytes(), device(), unit);
  if (tag.role == Role::Unsharded) return adopt(std::make_shared<UnshardedMemory>(std::move(memory), nbytes()));
  adopt(std::make_shared<at::DataPtr>(std::move(memory)));
}

void TaggedStorage::adopt(MemoryPtr memory) {
  attach(std::move(memory));
  owns_memory_ = true;
}

void TaggedStorage::resize(size_t bytes) {
  release();
  set_nbytes(bytes);
}

void TaggedStorage::attach(MemoryPtr memory) {
  unguard();
  memory_ = std::move(memory);
  owns_memory_ = false;
  show_memory();
}

void TaggedStorage::release() {
  // With TESSERA_POISON=1, code that still reads through a raw pointer sees NaN.
  static const bool poison = env_int("TESSERA_POISON", 0, 1).value_or(0) == 1 && Simulation::current() == nullptr;
  if (owns_memory()) {
    if (poison && device_type() == c10::kCPU && nbytes() > 0) std::memset(memory_->get(), 0xFF, nbytes());
    retire(std::move(memory_), nbytes(), Event::record(device()));
  }
  memory_.reset();
  show_memory();
  guard();
}

void TaggedStorage::guard() {
  compat::guard_storage(*this);
}

void TaggedStorage::unguard() {
  compat::unguard_storage(*this);
}

void TaggedStorage::explain(std::string why_no_memory) {
  compat::guard_storage(*this, std::move(why_no_memory));
  if (memory_) unguard();
}

void TaggedStorage::watch_raw_writes() {
  compat::tell_of_write(*this, [](c10::StorageImpl* written) {
    // The paging key is excluded inside operators that paging has seen and inside the library itself. Both take a WriteGuard before they
    // write.
    if (c10::impl::tls_is_dispatch_key_excluded(kPagingKey)) return;
    if (const auto unit = static_cast<TaggedStorage*>(written)->tag.unit.lock()) on_raw_write(unit);
  });
}

void TaggedStorage::remember_squares(double squares) {
  if (!compat::kTellsOfWrites) return;
  tag.squares = squares;
  compat::tell_of_write(*this, [](c10::StorageImpl* written) { static_cast<TaggedStorage*>(written)->tag.squares.reset(); });
}

at::Tensor TaggedStorage::memory_view(at::ScalarType dtype) const {
  auto keeper = std::make_unique<MemoryPtr>(memory_);
  auto* const memory = (*keeper)->get();
  at::DataPtr data(
      memory, keeper.release(), [](void* kept) { delete static_cast<MemoryPtr*>(kept); }, device());
  return flat_view(c10::Storage(c10::make_intrusive<c10::StorageImpl>(use_byte_size_t(), nbytes(), std::move(data), /*allocator=*/nullptr,
                                                                      /*resizable=*/false)),
                   dtype);
}

/// Sets the data pointer of the storage to its memory, or to null.
void TaggedStorage::show_memory() {
  set_data_ptr_noswap(at::DataPtr(memory_ ? memory_->get() : nullptr, device()));
}

}  // namespace tessera
