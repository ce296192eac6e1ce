#include "tessera/simulate/memory.h"

#include <c10/core/Allocator.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <numeric>

namespace tessera::simulate {
namespace {

/// Never destroyed, because tensors in static storage are freed after main.
struct Account {
  std::mutex mutex;
  MemoryUse use;
  uint64_t peak = 0;
  MemoryKind otherwise = MemoryKind::Parameters;
  std::function<void(const MemoryUse&)> at_peak;

  void add(MemoryKind kind, uint64_t bytes) {
    const std::lock_guard lock(mutex);
    use.of(kind) += bytes;
    if (const auto all = use.all(); all > peak) {
      peak = all;
      if (at_peak) at_peak(use);
    }
  }
  void remove(MemoryKind kind, uint64_t bytes) {
    const std::lock_guard lock(mutex);
    use.of(kind) -= bytes;
  }
};

Account& account() {
  static auto* const all = new Account;
  return *all;
}

struct Allocated {
  void* memory;
  size_t bytes;
  MemoryKind kind;
  bool is_mapped;
};

/// Maps large memory, so that pages which nobody writes take nothing, however much is reserved.
class ReservedMemory final : public c10::Allocator {
 public:
  at::DataPtr allocate(size_t bytes) override {
    constexpr size_t kMapped = size_t{64} << 10, kLine = 64;
    if (bytes == 0) return {nullptr, c10::kCPU};
    const bool is_mapped = bytes >= kMapped;
    void* memory = nullptr;
    if (is_mapped) {
      memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) throw std::bad_alloc();
    } else {
      memory = ::operator new(bytes, std::align_val_t(kLine));
      std::memset(memory, 0, bytes);
    }
    const auto scope = MemoryScope::kind();
    const auto kind = scope < 0 ? account().otherwise : static_cast<MemoryKind>(scope);
    account().add(kind, bytes);
    return {memory, new Allocated{memory, bytes, kind, is_mapped}, release, c10::kCPU};
  }
  at::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  static void release(void* context) {
    constexpr size_t kLine = 64;
    const auto* const allocated = static_cast<Allocated*>(context);
    account().remove(allocated->kind, allocated->bytes);
    if (allocated->is_mapped) {
      ::munmap(allocated->memory, allocated->bytes);
    } else {
      ::operator delete(allocated->memory, std::align_val_t(kLine));
    }
    delete allocated;
  }
};

}  // namespace

uint64_t MemoryUse::all() const {
  return std::accumulate(kinds.begin(), kinds.end(), uint64_t{0});
}

void count_memory(std::function<void(const MemoryUse&)> at_peak) {
  account().at_peak = std::move(at_peak);
  static auto* const memory = new ReservedMemory;
  c10::SetAllocator(c10::kCPU, memory, /*priority=*/UINT8_MAX);
}

void allocate_as(MemoryKind kind) {
  account().otherwise = kind;
}

void add_memory(MemoryKind kind, uint64_t bytes) {
  account().add(kind, bytes);
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
