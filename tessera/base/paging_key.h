// The dispatch key of unsharded parameters, shards, their gradients, and values computed from shards. It lies above autograd, and libtorch
// itself does not use it.
#pragma once

#include <c10/core/DispatchKey.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace tessera {

inline constexpr auto kPagingKey = c10::DispatchKey::DeferredInit;

/// Work of the library on tensors: neither paging nor autograd sees it, as long as the object exists.
struct Unpaged {
  const c10::impl::ExcludeDispatchKeyGuard below{kPagingKey};
  const c10::AutoGradMode no_grad{false};
};

}  // namespace tessera
