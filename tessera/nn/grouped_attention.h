// Attention in which several heads of queries share one of keys and values, by libtorch's fused kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera::nn {

struct GroupedAttention {
  at::Tensor mask = {};  // added to scores: {1 or batch, 1, queries, keys}, 0 where a query sees a key and -inf where not
  bool causal = false;   // each query sees the keys up to its own place; not beside a mask
  /// Causal, within documents: how long those are that follow each other in each row. Not beside a mask, and with as many keys as queries.
  const std::vector<std::vector<int64_t>>* documents = nullptr;
  double dropout = 0;
};

/// Takes queries {batch, heads, length, size} and keys and values {batch, fewer heads, keys, size}, and returns {batch, length, heads *
/// size}. On CPUs nothing of the size queries * keys is made, and keys and values are not repeated in memory, unless there is a mask, for
/// which they are, or dropout. Throws UsageError for what does not belong together.
at::Tensor grouped_attention(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                             const GroupedAttention& options = {});

/// How bfloat16 is computed on processors without instructions for it: in float32, which is also what backward keeps, and rounded.
at::Tensor wide_attention(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                          const GroupedAttention& options = {});

}  // namespace tessera::nn
