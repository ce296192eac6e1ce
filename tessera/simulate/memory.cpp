#include "tessera/simulate/memory.h"

#include <c10/core/Allocator.h>
#include <sys/mman.h>

#include <cstring>
#include <mutex>
#include <new>

namespace tessera::simulate {
namespace {

constexpr size_t kMapped = size_t{64} << 10;
constexpr std::align_val_t kLine{64};

struct Account {
  std::mutex mutex;
  MemoryUse use = {};
  uint64_t peak = 0;
  MemoryKind otherwise = MemoryKind::Parameters;
  std::function<void(const MemoryUse&)> at_peak;
};

/// Never destroyed, because tensors in static storage are freed after main.
Account& account() {
  static auto* const all = new Account;
  return *all;
}

struct Allocated {
  void* memory;
  size_t bytes;
  MemoryKind kind;
};

void release(void* context) {
  const auto* const allocated = static_cast<Allocated*>(context);
  {
    const std::lock_guard lock(account().mutex);
    account().use[static_cast<size_t>(allocated->kind)] -= allocated->bytes;
  }
  if (allocated->bytes >= kMapped) {
    ::munmap(allocated->memory, allocated->bytes);
  } else {
    ::operator delete(allocated->memory, kLine);
  }
  delete allocated;
}

/// Maps large memory, so that pages which nobody writes take nothing, however much is reserved.
class ReservedMemory final : public c10::Allocator {
 public:
  at::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::kCPU};
    void* memory = nullptr;
    if (bytes >= kMapped) {
      memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) throw std::bad_alloc();
    } else {
      memory = std::memset(::operator new(bytes, kLine), 0, bytes);
    }
    const auto scope = MemoryScope::kind();
    const auto kind = scope < 0 ? account().otherwise : static_cast<MemoryKind>(scope);
    add_memory(kind, bytes);
    return {memory, new Allocated{memory, bytes, kind}, release, c10::kCPU};
  }
  at::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

}  // namespace

void count_memory(std::function<void(const MemoryUse&)> at_peak) {
  account().at_peak = std::move(at_peak);
  static auto* const memory = new ReservedMemory;
  c10::SetAllocator(c10::kCPU, memory, /*priority=*/UINT8_MAX);
}

void allocate_as(MemoryKind kind) {
  account().otherwise = kind;
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
