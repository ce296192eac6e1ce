// Copies this rank's part of a sharded tensor into an ordinary tensor.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera {

/// Returns a copy of this rank's values of a shard, of its gradient, or of a tensor computed from them. Given a module's own member, copies
/// from its shard. Operators that mix values (sums, norms, matrix products) are refused on shards, because their results would look like
/// results for the full parameter. They are allowed on the copy.
at::Tensor to_local(const at::Tensor& tensor);

}  // namespace tessera
