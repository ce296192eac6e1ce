// The memory of the silent device: for each address that the world sees, one readable block for each replica.
#pragma once

#include <c10/core/Allocator.h>

#include <array>
#include <map>
#include <mutex>

#include "tessera/testing/silent_device.h"

namespace tessera::testing {

inline constexpr auto kSilent = c10::DeviceType::PrivateUse1;

class SilentMemory final : public c10::Allocator {
 public:
  static SilentMemory& instance();

  at::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dest, const void* src, size_t bytes) const override;

  /// Where a replica's value of what the world sees at `address` lies.
  void* readable(const void* address, int index) const;

 private:
  struct Block {
    size_t pages = 0;  // bytes that are mapped
    std::array<at::DataPtr, kReplicas> values;
  };
  static void release(void* address);
  const Block& block(const void* address) const;

  mutable std::mutex mutex_;
  std::map<const void*, Block> blocks_;
};

}  // namespace tessera::testing
