// The dispatch key that sharded parameters, their shards, gradients and what is computed from shards carry. It lies above autograd, and
// libtorch leaves it alone.
#pragma once

#include <c10/core/DispatchKey.h>

namespace tessera {

inline constexpr auto kPagingKey = c10::DispatchKey::DeferredInit;

}  // namespace tessera
