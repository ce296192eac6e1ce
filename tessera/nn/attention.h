// Attention by libtorch's fused kernels: layers in which each query head has its own keys and values, and a function in which groups of
// query heads share keys and values.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/shard/call.h"

namespace tessera::nn {

struct SelfAttentionOptions {
  int64_t width = 0;
  int64_t heads = 1;  // must divide the width
  bool causal = true;
  std::string name_of_out = "out";  // of the last layer, in files
};

struct SelfAttentionImpl : torch::nn::Module {
  explicit SelfAttentionImpl(const SelfAttentionOptions& options);

  /// Takes and returns {batch, length, width}.
  at::Tensor forward(const at::Tensor& x);

  SelfAttentionOptions options;
  torch::nn::Linear qkv{nullptr}, out{nullptr};
};
TORCH_MODULE(SelfAttention);

/// A layer of a transformer: x + attention(norm1(x)), and then the same with norm2 and a perceptron.
struct PreNormLayer : torch::nn::Module {
  PreNormLayer(const SelfAttentionOptions& options, double eps);
  at::Tensor forward(const at::Tensor& x);

  Called<torch::nn::LayerNorm> norm1{nullptr}, norm2{nullptr};
  Called<SelfAttention> attention{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};

struct GroupedAttention {
  at::Tensor mask = {};  // added to scores: {1 or batch, 1, queries, keys}, 0 where a query sees a key and -inf where not
  bool causal = false;   // each query sees the keys up to its own place; not together with a mask
  /// The lengths of the documents in each row; queries see only earlier keys of their own document. Not together with a mask, and only with
  /// as many keys as queries.
  const std::vector<std::vector<int64_t>>* documents = nullptr;
  double dropout = 0;
  std::optional<double> scale = {};  // of scores; 1 / sqrt(size) unless given
  /// Scores become softcap * tanh(score / softcap) before the mask; 0: they stay. Not together with dropout.
  double softcap = 0;
};

/// Takes queries {batch, heads, length, size} and keys and values {batch, fewer heads, keys, size}, and returns {batch, length, heads *
/// size}. On CPUs, without a mask and dropout, no tensor of queries * keys is made, and keys and values are not repeated in memory. With a
/// softcap, scores are in memory for a part of the queries at a time, and again in backward, which can't be differentiated.
/// Throws UsageError for arguments that don't fit each other.
at::Tensor grouped_attention(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                             const GroupedAttention& options = {});

/// Attention in bfloat16 on processors without bfloat16 instructions: computes in float32, also saves float32 for backward, and rounds the
/// result.
at::Tensor wide_attention(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                          const GroupedAttention& options = {});

}  // namespace tessera::nn
