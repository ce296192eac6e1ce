// This rank's part of something sharded, as an ordinary tensor.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera {

/// A copy of a shard's values on this rank, of its gradient's, or of what was computed from them. Operators that mix values are refused
/// over shards, because their results would pass for those of whole parameters; over this copy they are not.
at::Tensor to_local(const at::Tensor& tensor);

}  // namespace tessera
