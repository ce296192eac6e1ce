#include "tessera/nn/grouped_attention.h"

#include <ATen/ATen.h>

namespace tessera::nn {
namespace {

/// Each head of keys or values becomes a batch of its own, which all heads of queries of a group read.
at::Tensor for_groups(const at::Tensor& x, int64_t groups) {
  return x.flatten(0, 1).unsqueeze(1).expand({-1, groups, -1, -1});
}

}  // namespace

at::Tensor grouped_attention(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values, const GroupedAttention& options) {
  const auto batch = queries.size(0), heads = queries.size(1), length = queries.size(2), size = queries.size(3);
  const auto shared = keys.size(1), groups = heads / shared;
  std::optional<at::Tensor> mask;
  if (options.mask.defined()) mask = options.mask.size(0) == 1 ? options.mask : options.mask.repeat_interleave(shared, 0);
  const auto mixed = at::scaled_dot_product_attention(queries.reshape({batch * shared, groups, length, size}), for_groups(keys, groups),
                                                      for_groups(values, groups), mask, options.dropout, options.causal);
  return mixed.view({batch, shared, groups, length, size}).permute({0, 3, 1, 2, 4}).reshape({batch, length, heads * size});
}

}  // namespace tessera::nn
