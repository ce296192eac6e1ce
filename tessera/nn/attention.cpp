#include "tessera/nn/attention.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "tessera/base/error.h"
#include "tessera/nn/linear.h"

namespace tessera::nn {

SelfAttentionImpl::SelfAttentionImpl(const SelfAttentionOptions& options) : options(options) {
  if (options.width <= 0 || options.heads <= 0 || options.width % options.heads != 0) {
    throw UsageError(fmt::format("self attention: a width of {} can't be divided among {} heads", options.width, options.heads));
  }
  qkv = register_module("qkv", torch::nn::Linear(options.width, 3 * options.width));
  out = register_module("out", torch::nn::Linear(options.width, options.width));
}

at::Tensor SelfAttentionImpl::forward(const at::Tensor& x) {
  const auto batch = x.size(0), length = x.size(1);
  const auto parts =
      linear(qkv, x).view({batch, length, 3, options.heads, options.width / options.heads}).permute({2, 0, 3, 1, 4}).unbind();
  const auto mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, /*dropout_p=*/0.0, options.causal);
  return linear(out, mixed.transpose(1, 2).reshape({batch, length, options.width}));
}

}  // namespace tessera::nn
