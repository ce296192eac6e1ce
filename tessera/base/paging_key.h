// The dispatch key of unsharded parameters, shards, their gradients, and values computed from shards. It lies above autograd, and libtorch
// itself does not use it.
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace tessera {

inline constexpr auto kPagingKey = c10::DispatchKey::DeferredInit;

/// As long as this object exists, operators of this thread bypass paging and autograd, and work on the memory of tensors as it is.
struct BelowPaging {
  const c10::AutoGradMode no_grad{false};
  const c10::impl::ExcludeDispatchKeyGuard below{kPagingKey};
};

}  // namespace tessera
