#include "tessera/simulate/memory.h"

#include <c10/core/Allocator.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstring>
#include <mutex>
#include <new>

namespace tessera::simulate {
namespace {

constexpr size_t kMapped = size_t{64} << 10, kLine = 64;

struct Account {
  std::mutex mutex;
  MemoryUse use = {};
  uint64_t peak = 0;
  std::function<void(const MemoryUse&)> at_peak;
};

/// Never destroyed, because tensors in static storage are freed after main.
Account& account() {
  static auto* const all = new Account;
  return *all;
}

/// Only the program's own thread counts: threads that make batches run at any time.
thread_local bool is_counted = false;

/// Stands kLine bytes before the memory of a tensor, because oneDNN frees memory by its address alone.
struct AllocatedHeader {
  size_t bytes;  // with the header
  MemoryKind kind;
  bool is_counted;
};

void free_reserved(void* memory) {
  if (memory == nullptr) return;
  auto* const begin = static_cast<std::byte*>(memory) - kLine;
  const auto [bytes, kind, counted] = *reinterpret_cast<const AllocatedHeader*>(begin);
  if (counted) {
    const std::lock_guard lock(account().mutex);
    account().use[static_cast<size_t>(kind)] -= bytes - kLine;
  }
  if (bytes >= kMapped) {
    ::munmap(begin, bytes);
  } else {
    ::operator delete(begin, std::align_val_t(kLine));
  }
}

/// Maps large memory, so that pages which nobody writes take nothing, however much is reserved.
class ReservedMemory final : public c10::Allocator {
 public:
  at::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, c10::kCPU};
    const auto bytes = size + kLine;
    void* begin = nullptr;
    if (bytes >= kMapped) {
      begin = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (begin == MAP_FAILED) throw std::bad_alloc();
    } else {
      begin = std::memset(::operator new(bytes, std::align_val_t(kLine)), 0, bytes);
    }
    const auto scope = MemoryScope::kind();
    // Shards are in a scope; outside of all are also the program's data, and models until they are sharded.
    const auto kind = scope < 0 ? MemoryKind::Activations : static_cast<MemoryKind>(scope);
    new (begin) AllocatedHeader{bytes, kind, is_counted};
    if (is_counted) add_memory(kind, size);
    auto* const memory = static_cast<std::byte*>(begin) + kLine;
    return {memory, memory, free_reserved, c10::kCPU};
  }
  at::DeleterFnPtr raw_deleter() const override { return free_reserved; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

}  // namespace

void count_memory(std::function<void(const MemoryUse&)> at_peak) {
  account().at_peak = std::move(at_peak);
  is_counted = true;
  static auto* const memory = new ReservedMemory;
  c10::SetAllocator(c10::kCPU, memory, /*priority=*/UINT8_MAX);
}

void add_memory(MemoryKind kind, uint64_t bytes) {
  const std::lock_guard lock(account().mutex);
  account().use[static_cast<size_t>(kind)] += bytes;
  if (const auto all = account().use.all(); all > account().peak) {
    account().peak = all;
    if (account().at_peak) account().at_peak(account().use);
  }
}

void reset_peak() {
  const std::lock_guard lock(account().mutex);
  account().peak = 0;
}

MemoryUse memory_in_use() {
  const std::lock_guard lock(account().mutex);
  return account().use;
}

}  // namespace tessera::simulate
