// The allocator of the silent device. Each unreadable address that it returns has one readable block for each replica.
#pragma once

#include <c10/core/Allocator.h>

#include <array>
#include <map>
#include <mutex>

#include "tests/testing/silent_device.h"

namespace tessera::testing {

inline constexpr auto kSilent = c10::DeviceType::PrivateUse1;

class SilentMemory final : public c10::Allocator {
 public:
  static SilentMemory& instance();

  at::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dest, const void* src, size_t bytes) const override;

  /// The readable block of a replica for an address of the device.
  void* readable(const void* address, int index) const;

 private:
  struct Block {
    size_t pages = 0;  // size of the mapping in bytes
    std::array<at::DataPtr, kReplicas> values;
  };
  static void release(void* address);
  const Block& block(const void* address) const;

  mutable std::mutex mutex_;
  std::map<const void*, Block> blocks_;
};

}  // namespace tessera::testing
