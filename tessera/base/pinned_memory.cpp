#include "tessera/base/pinned_memory.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <mutex>
#include <vector>

namespace tessera {

bool has_pinned_memory(c10::Device device) {
  return !device.is_cpu() && !device.is_meta() && !device.is_xla();
}

at::DataPtr allocate_pinned(size_t bytes, c10::Device device) {
  return at::globalContext().getPinnedMemoryAllocator(device.type())->allocate(bytes);
}

at::Tensor empty_pinned(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) {
  const auto bytes = static_cast<size_t>(c10::multiply_integers(sizes)) * c10::elementSize(dtype);
  const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, allocate_pinned(bytes, device), /*allocator=*/nullptr,
                             /*resizable=*/false);
  return at::empty({0}, at::TensorOptions(at::kCPU).dtype(dtype)).set_(storage, 0, sizes, c10::contiguous_strides(sizes));
}

c10::Stream copy_stream(c10::Device device, Copying direction) {
  struct Known {
    c10::Device device;
    Copying direction;
    c10::Stream stream;
  };
  static std::mutex mutex;
  static auto* const known = new std::vector<Known>;  // never destroyed, because tensors in static storage may be copied at any time
  const std::lock_guard lock(mutex);
  for (const auto& each : *known) {
    if (each.device == device && each.direction == direction) return each.stream;
  }
  const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/false);
  return known->emplace_back(Known{.device = device, .direction = direction, .stream = stream}).stream;
}

Event copy_to_pinned(const at::Tensor& values, const at::Tensor& pinned) {
  const auto queued = Event::record(values.device());
  const c10::StreamGuard beside(copy_stream(values.device(), Copying::ToHost));
  queued.block();
  at::Tensor(pinned).copy_(values, /*non_blocking=*/true);
  return Event::record(values.device());
}

}  // namespace tessera
