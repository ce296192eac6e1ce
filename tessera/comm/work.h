// An operation under way.
#pragma once

#include <memory>

namespace tessera {

/// Handed out by every collective. Dropping it does not cancel the operation; the buffers stay alive until it is through.
class [[nodiscard]] Work {
 public:
  /// How an engine finishes an operation.
  struct State {
    virtual ~State() = default;
    virtual void wait() = 0;
    virtual bool done() const = 0;
  };

  /// Already done: what a tracing engine returns.
  Work() = default;
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}

  /// Returns when the results may be used. Throws what went wrong, on whichever rank, however often it is called.
  void wait() const {
    if (state_) state_->wait();
  }

  bool done() const { return !state_ || state_->done(); }

 private:
  std::shared_ptr<State> state_;
};

}  // namespace tessera
