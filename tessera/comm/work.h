// An operation under way.
#pragma once

#include <memory>
#include <utility>

#include "tessera/base/event.h"

namespace tessera {

/// Handed out by every collective. Dropping it does not cancel the operation; the buffers stay alive until it is through or waited for.
class [[nodiscard]] Work {
 public:
  /// How an engine finishes an operation, which on a device runs after what its caller had queued on the current stream.
  struct State {
    virtual ~State() = default;
    virtual void wait() = 0;
    virtual bool done() const = 0;
    /// Asked for after wait(): the point in a device's queue after which the results are there.
    virtual Event ready_event() const { return {}; }
  };

  /// Already done: what a tracing engine returns.
  Work() = default;
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}

  /// Returns when the results may be used by the host, or on a device by what the calling thread queues on its current stream from now on.
  /// Throws what went wrong, on whichever rank, however often it is called.
  void wait() const {
    if (!state_) return;
    state_->wait();
    state_->ready_event().block();
  }

  /// Whether wait() would return at once.
  bool done() const { return !state_ || state_->done(); }

 private:
  std::shared_ptr<State> state_;
};

}  // namespace tessera
