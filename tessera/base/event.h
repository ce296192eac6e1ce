// A point in the work that is queued on a device. Once it has passed, memory that earlier work reads may be reused.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <optional>

namespace tessera {

/// A value, cheap to copy. An event that was never recorded counts as passed. block() on the event's own stream does nothing.
class Event {
 public:
  Event() = default;

  /// Returns the end of the work that the calling thread has queued so far on its current stream of the device. On the CPU nothing is ever
  /// queued.
  static Event record(c10::Device device) {
    auto event = later(device);
    if (event.stream_) event.event_ = recorded(*event.stream_);
    return event;
  }

  /// Like record(), but cheaper for an event that other streams rarely wait for: it is recorded on the device only when another stream
  /// waits for it. That stream then waits for all work that is queued on the event's stream by that time. Until then the event's stream
  /// must exist.
  static Event later(c10::Device device) {
    Event event;
    if (!device.is_cpu()) event.stream_ = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    return event;
  }

  bool is_on_stream_of(const Event& other) const { return stream_ == other.stream_; }

  /// Whether the event is known to have passed, so that nothing has to wait for it.
  bool passed() const { return !stream_ || (event_ && event_->query()); }

  /// Makes work that the calling thread queues from now on, on its current stream of the event's device, run after the event.
  void block() const {
    if (!stream_) return;
    const auto current = c10::impl::VirtualGuardImpl(stream_->device_type()).getStream(stream_->device());
    if (current != *stream_) now()->block(current);
  }

  /// Blocks the calling thread until the event has passed.
  void synchronize() const {
    if (stream_) now()->synchronize();
  }

 private:
  static std::shared_ptr<c10::Event> recorded(const c10::Stream& stream) {
    auto event = std::make_shared<c10::Event>(stream.device_type());
    event->record(stream);
    return event;
  }

  std::shared_ptr<c10::Event> now() const { return event_ ? event_ : recorded(*stream_); }

  std::optional<c10::Stream> stream_ = {};
  std::shared_ptr<c10::Event> event_;  // null until it is recorded on the device
};

}  // namespace tessera
