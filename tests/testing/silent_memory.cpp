#include "tests/testing/silent_memory.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

namespace tessera::testing {

SilentMemory& SilentMemory::instance() {
  static auto* const memory = new SilentMemory;  // never destroyed, because tensors in static storage may be freed after main
  return *memory;
}

at::DataPtr SilentMemory::allocate(size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  Block block{.pages = (bytes / page + 1) * page, .values = {}};
  for (auto& value : block.values) value = c10::GetAllocator(c10::kCPU)->allocate(bytes);
  auto* address = mmap(nullptr, block.pages, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of unreadable pages");
  const std::lock_guard lock(mutex_);
  blocks_[address] = std::move(block);
  return {address, address, &release, c10::Device(kSilent, 0)};
}

void SilentMemory::release(void* address) {
  auto& memory = instance();
  const std::lock_guard lock(memory.mutex_);
  const auto found = memory.blocks_.find(address);
  munmap(address, found->second.pages);
  memory.blocks_.erase(found);
}

const SilentMemory::Block& SilentMemory::block(const void* address) const {
  const auto found = blocks_.find(address);
  if (found == blocks_.end()) throw std::logic_error(fmt::format("the silent device knows no memory at {}", fmt::ptr(address)));
  return found->second;
}

void* SilentMemory::readable(const void* address, int index) const {
  const std::lock_guard lock(mutex_);
  return block(address).values.at(static_cast<size_t>(index)).get();
}

void SilentMemory::copy_data(void* dest, const void* src, size_t bytes) const {
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < kReplicas; i++) std::memcpy(block(dest).values[i].get(), block(src).values[i].get(), bytes);
}

}  // namespace tessera::testing
