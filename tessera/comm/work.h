// A handle for an operation that was started.
#pragma once

#include <memory>
#include <utility>

#include "tessera/base/event.h"

namespace tessera {

/// Every collective returns a Work. Dropping it does not cancel the operation. The operation keeps its buffers alive until it has ended.
class [[nodiscard]] Work {
 public:
  /// The operation itself. On a device, it runs after what its caller had queued on the current stream.
  struct State {
    virtual ~State() = default;
    virtual void wait() = 0;
    virtual bool done() const = 0;
    /// Called after wait(): the point in a device's queue after which the results are ready.
    virtual Event ready_event() const { return {}; }
  };

  /// An operation that is already done. Tracing engines return it.
  Work() = default;
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}

  /// Returns when the results may be used: by the host, or, on a device, by what the calling thread queues on its current stream from now
  /// on. If the operation failed on any rank, every call throws its error.
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
