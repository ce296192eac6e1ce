// Attention in which several heads of queries share one of keys and values, by libtorch's fused kernels.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::nn {

struct GroupedAttention {
  at::Tensor mask = {};  // true where a query sees a key: {1 or batch, 1, queries, keys}
  bool causal = false;   // each query sees the keys up to its own place; not beside a mask
  double dropout = 0;
};

/// Takes queries {batch, heads, length, size} and keys and values {batch, fewer heads, keys, size}, and returns {batch, length, heads *
/// size}. Keys and values are read as they are, and not repeated in memory. On CPUs nothing of the size queries * keys is made, except for
/// a mask, which then costs that once; with dropout it is made.
at::Tensor grouped_attention(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                             const GroupedAttention& options = {});

}  // namespace tessera::nn
