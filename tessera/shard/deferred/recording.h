// Recording: runs operators on deferred tensors on the meta device and writes them to a tape, inside deferred_init and after it.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>

#include "tessera/base/no_copy.h"
#include "tessera/base/paging_key.h"
#include "tessera/shard/deferred/tape.h"
#include "tessera/shard/dispatch/operators.h"

namespace tessera {

/// While it lives, tensors that this thread makes are deferred. Every operator of the thread then goes through the fallback of paging.
class Recording : NoCopy {
 public:
  explicit Recording(std::shared_ptr<Tape> tape);
  ~Recording();

  /// The tape of this thread, or null.
  static const std::shared_ptr<Tape>& tape();

 private:
  std::shared_ptr<Tape> before_;
  c10::impl::IncludeDispatchKeyGuard included_{kPagingKey};
};

/// Called by the fallback of paging, if may_be_deferred(). Runs the operator. Returns false, without running it, if an operand is sharded,
/// or if no operand is deferred and this thread does not record. Throws UsageError if the operator needs values of a parameter or a buffer
/// that has none.
bool record(const c10::OperatorHandle& handle, const OperatorFacts& op, c10::DispatchKeySet below, torch::jit::Stack* stack);

}  // namespace tessera
