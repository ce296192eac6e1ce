// DeviceQueue: a stream for the operations of an engine, separate from the stream on which the device computes.
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "tessera/comm/transport.h"

namespace tessera {

class DeviceQueue {
 public:
  explicit DeviceQueue(c10::Device device)
      : stream_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true)) {}

  /// Runs `act`, so that work that it queues runs on this stream, after the caller's inputs are ready. `act` returns how much it
  /// sends, as a Moved without an event.
  template <class Act>
  Moved run(const Launch& start, const Act& act) const {
    const c10::StreamGuard current(stream_);
    start.inputs.block();
    Moved moved = act();
    moved.ready = Event::record(stream_.device());
    return moved;
  }

  /// Keeps the memory of a tensor from being used again before the queued work has ended.
  void uses(const at::Tensor& tensor) const {
    if (tensor.numel() == 0) return;
    c10::impl::VirtualGuardImpl(stream_.device_type()).recordDataPtrOnStream(tensor.storage().data_ptr(), stream_);
  }

 private:
  const c10::Stream stream_;
};

}  // namespace tessera
