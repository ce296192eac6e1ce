// The dispatch key of unsharded parameters, shards, their gradients, and values computed from shards. It lies above autograd, and libtorch
// itself does not use it.
#pragma once

#include <c10/core/DispatchKey.h>

namespace tessera {

inline constexpr auto kPagingKey = c10::DispatchKey::DeferredInit;

}  // namespace tessera
