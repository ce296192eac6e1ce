// Multi-head self-attention, computed by libtorch's fused kernels.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

namespace tessera::nn {

struct SelfAttentionOptions {
  int64_t width = 0;
  int64_t heads = 1;  // must divide the width
  bool causal = true;
};

struct SelfAttentionImpl : torch::nn::Module {
  explicit SelfAttentionImpl(const SelfAttentionOptions& options);

  /// Takes and returns {batch, length, width}.
  at::Tensor forward(const at::Tensor& x);

  SelfAttentionOptions options;
  torch::nn::Linear qkv{nullptr}, out{nullptr};
};
TORCH_MODULE(SelfAttention);

}  // namespace tessera::nn
