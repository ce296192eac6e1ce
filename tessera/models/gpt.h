// A decoder like GPT-2, with learned positions and norms before attention and MLP. Unlike GPT-2, it ties no weights.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/pimpl.h>

#include "tessera/nn/attention.h"

namespace tessera::models {

struct GptOptions {
  int64_t vocabulary = 8192;
  int64_t width = 512;
  int64_t layers = 8;
  int64_t heads = 8;
  int64_t longest = 256;  // maximum number of tokens in a sequence
};

struct GptBlockImpl : nn::PreNormLayer {
  GptBlockImpl(int64_t width, int64_t heads) : PreNormLayer({.width = width, .heads = heads}, /*eps=*/1e-5) {}
};
TORCH_MODULE(GptBlock);

struct GptImpl : torch::nn::Module {
  explicit GptImpl(const GptOptions& options = {});

  /// Takes tokens {batch, length} and returns scores {batch, length, vocabulary}.
  at::Tensor forward(const at::Tensor& tokens);

  Called<torch::nn::Embedding> tokens{nullptr}, positions{nullptr};
  torch::nn::ModuleList blocks;
  Called<torch::nn::LayerNorm> norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Gpt);

}  // namespace tessera::models
