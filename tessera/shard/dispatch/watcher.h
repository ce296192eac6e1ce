// Watcher: sees every operator that a thread calls, not only operators with paged operands. Segments of activation checkpointing need it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <mutex>
#include <optional>

#include "tessera/base/no_copy.h"

namespace tessera {

struct OperatorFacts;

class Watcher : NoCopy {
 public:
  virtual ~Watcher() = default;

  /// Whether the watcher sees the operators that a composite calls, one by one, in place of the composite. `keys` contain the device.
  virtual bool opens(const OperatorFacts& op, c10::DispatchKeySet keys) const = 0;
  /// Called with the operands on the stack, unsharded and cast: runs the operator with `handle.redispatchBoxed(below, &stack)`, or puts its
  /// results onto the stack in another way.
  virtual void run(const c10::OperatorHandle& handle, const OperatorFacts& op, c10::DispatchKeySet below, torch::jit::Stack& stack) = 0;

  /// Returns the tensor whose values an operator is to read: the operand itself, or a copy in its place.
  virtual at::Tensor instead_of(const at::Tensor& operand) const = 0;
  /// Called when the library gives the operator `by` in place of an operand: a cast, or a tensor that a trace has tied to others. Keeps
  /// `by` as long as autograd would, because later operators may be given the same tensor.
  virtual void replaced(const at::Tensor& operand, const at::Tensor& by) = 0;

  /// The watcher of this thread, or null. Threads of the autograd engine that run a backward pass which was started under watch are
  /// watched, too, and need a Turn.
  static Watcher* current();

  /// The watcher of this thread, or null. As long as the object exists, the watch does not end, and no other thread has a turn.
  class Turn;

 protected:
  /// Whether the operator that is called now is a cast by which the library converts an operand of another operator.
  bool is_casting() const { return is_casting_; }

 private:
  friend class CastingOperand;
  bool is_casting_ = false;
};

class Watcher::Turn : NoCopy {
 public:
  Turn();

  explicit operator bool() const { return watcher_ != nullptr; }
  Watcher* operator->() const { return watcher_; }
  Watcher* get() const { return watcher_; }

 private:
  std::unique_lock<std::recursive_mutex> lock_;
  Watcher* watcher_ = nullptr;
};

/// Marks that the library casts an operand of another operator. The program has not called the cast, and a recomputation may run without
/// it, because the library reuses the results of casts.
class CastingOperand : NoCopy {
 public:
  CastingOperand() {
    if (turn_) turn_->is_casting_ = true;
  }
  ~CastingOperand() {
    if (turn_) turn_->is_casting_ = false;
  }

 private:
  const Watcher::Turn turn_;
};

/// Makes `watcher` the watcher of this thread as long as the object exists; null pauses the watch.
class Watching : NoCopy {
 public:
  explicit Watching(Watcher* watcher);
  ~Watching();

 private:
  struct Watched;
  friend class Watcher;

  const std::shared_ptr<Watched> watched_;
  const c10::DebugInfoGuard carried_;
  const c10::impl::ForceDispatchKeyGuard keys_;
};

/// Pauses the watch for work of the library inside an operator, which is not a part of the program.
class Unwatched {
 public:
  Unwatched() {
    if (Watcher::current() != nullptr) pause_.emplace(nullptr);
  }

 private:
  std::optional<Watching> pause_;
};

}  // namespace tessera
