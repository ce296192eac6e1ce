// A point in the work that is queued on a device: memory that queued work still reads may be reused once it has passed.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>

namespace tessera {

/// A value, cheap to copy. An event that was never recorded counts as passed.
class Event {
 public:
  Event() = default;

  /// The end of what the calling thread has queued so far on its current stream of the device. On the CPU nothing is ever queued.
  static Event record(c10::Device device) {
    Event event;
    if (device.is_cpu()) return event;
    event.event_ = std::make_shared<c10::Event>(device.type());
    event.event_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    return event;
  }

  bool passed() const { return !event_ || event_->query(); }

  /// What the calling thread queues on its current stream of the event's device from now on runs after the event.
  void block() const {
    if (event_) event_->block(c10::impl::VirtualGuardImpl(event_->device_type()).getStream(event_->device()));
  }

  /// Blocks the calling thread until the event has passed.
  void synchronize() const {
    if (event_) event_->synchronize();
  }

 private:
  std::shared_ptr<c10::Event> event_;
};

}  // namespace tessera
