// Mixtures of experts, as in Mixtral and Qwen-MoE: a router chooses for each token a few of many small networks.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <vector>

#include "tessera/models/llama_config.h"
#include "tessera/shard/call.h"

namespace tessera::models {

/// Draws the weight as transformers does; a bias begins as zeros.
torch::nn::Linear make_linear(int64_t inputs, int64_t outputs, bool bias, const LlamaConfig& config);

/// One expert. In mixtral, gate, up and down are called w1, w3 and w2.
struct LlamaExpertImpl : torch::nn::Module {
  LlamaExpertImpl(const LlamaConfig& config, int64_t intermediate_size);
  at::Tensor forward(const at::Tensor& states);

  torch::nn::Linear gate_proj{nullptr}, up_proj{nullptr}, down_proj{nullptr};
};
TORCH_MODULE(LlamaExpert);

/// The router's scores in each layer, {tokens, experts}; undefined for layers without experts.
using RouterScores = std::shared_ptr<std::vector<at::Tensor>>;

/// The experts of a layer and their router. A rank calls the experts that tokens of any rank need, so units of experts are gathered, and
/// their gradients reduced, only then. On CPUs and GPUs, an expert computes its own tokens, whose numbers the host has to know; on devices
/// that compile steps, each expert computes all tokens.
struct LlamaExpertsImpl : torch::nn::Module {
  LlamaExpertsImpl(const LlamaConfig& config, int64_t layer);
  /// Stores the router's scores in `scores`, unless it is null.
  at::Tensor forward(const at::Tensor& states, const RouterScores& scores = nullptr);

  int64_t layer;
  ExpertOptions options;
  torch::nn::Linear gate{nullptr}, shared_expert_gate{nullptr};  // the latter only for qwen2_moe
  torch::nn::ModuleList experts;
  Called<LlamaExpert> shared_expert{nullptr};

 private:
  at::Tensor by_expert(const at::Tensor& rows, const at::Tensor& weights, const at::Tensor& chosen);
};
TORCH_MODULE(LlamaExperts);

/// Returns the loss by which training spreads tokens over the experts (transformers' load_balancing_loss_func), over all layers together.
/// `counted`: which tokens count, {tokens}; all unless given.
at::Tensor balance_loss(const std::vector<at::Tensor>& scores, const ExpertOptions& options, const at::Tensor& counted = {});

}  // namespace tessera::models
