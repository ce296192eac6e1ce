// BERT, an encoder of texts. Parameters have the names of transformers' BertModel and BertForSequenceClassification, so that weights can be
// exchanged, and modules have the names of its classes, so that a list of classes to shard fits both.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <string>
#include <utility>
#include <vector>

#include "tessera/models/bert_config.h"
#include "tessera/shard/call.h"

namespace tessera::models {

/// Pairs of a pattern and its replacement, for checkpoint::WeightsOptions::renamed.
using Renames = std::vector<std::pair<std::string, std::string>>;

// Below, states are {batch, length, hidden_size}, and a mask is of bool, {batch, 1, 1, length}, true where there is a token.

struct BertEmbeddingsImpl : torch::nn::Module {
  explicit BertEmbeddingsImpl(const BertConfig& config);
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& types);

  Called<torch::nn::Embedding> word_embeddings{nullptr}, position_embeddings{nullptr}, token_type_embeddings{nullptr};
  Called<torch::nn::LayerNorm> norm{nullptr};
  Called<torch::nn::Dropout> dropout{nullptr};
};
TORCH_MODULE(BertEmbeddings);

struct BertSelfAttentionImpl : torch::nn::Module {
  explicit BertSelfAttentionImpl(const BertConfig& config);
  at::Tensor forward(const at::Tensor& states, const at::Tensor& mask);

  const int64_t heads;
  const double dropout;
  torch::nn::Linear query{nullptr}, key{nullptr}, value{nullptr};
};
TORCH_MODULE(BertSelfAttention);

/// The norm of x plus a linear function of y.
struct BertResidual : torch::nn::Module {
  BertResidual(int64_t inputs, const BertConfig& config);
  at::Tensor forward(const at::Tensor& y, const at::Tensor& x);

  torch::nn::Linear dense{nullptr};
  Called<torch::nn::LayerNorm> norm{nullptr};
  Called<torch::nn::Dropout> dropout{nullptr};
};
struct BertSelfOutputImpl : BertResidual {
  explicit BertSelfOutputImpl(const BertConfig& config) : BertResidual(config.hidden_size, config) {}
};
TORCH_MODULE(BertSelfOutput);
struct BertOutputImpl : BertResidual {
  explicit BertOutputImpl(const BertConfig& config) : BertResidual(config.intermediate_size, config) {}
};
TORCH_MODULE(BertOutput);

struct BertAttentionImpl : torch::nn::Module {
  explicit BertAttentionImpl(const BertConfig& config);
  at::Tensor forward(const at::Tensor& states, const at::Tensor& mask);

  Called<BertSelfAttention> self{nullptr};
  Called<BertSelfOutput> output{nullptr};
};
TORCH_MODULE(BertAttention);

struct BertIntermediateImpl : torch::nn::Module {
  explicit BertIntermediateImpl(const BertConfig& config);
  at::Tensor forward(const at::Tensor& states);

  const BertActivation activation;
  torch::nn::Linear dense{nullptr};
};
TORCH_MODULE(BertIntermediate);

struct BertLayerImpl : torch::nn::Module {
  explicit BertLayerImpl(const BertConfig& config);
  at::Tensor forward(const at::Tensor& states, const at::Tensor& mask);

  Called<BertAttention> attention{nullptr};
  Called<BertIntermediate> intermediate{nullptr};
  Called<BertOutput> output{nullptr};
};
TORCH_MODULE(BertLayer);

struct BertEncoderImpl : torch::nn::Module {
  explicit BertEncoderImpl(const BertConfig& config);
  at::Tensor forward(at::Tensor states, const at::Tensor& mask);

  torch::nn::ModuleList layer;
};
TORCH_MODULE(BertEncoder);

struct BertPoolerImpl : torch::nn::Module {
  explicit BertPoolerImpl(const BertConfig& config);
  at::Tensor forward(const at::Tensor& states);

  torch::nn::Linear dense{nullptr};
};
TORCH_MODULE(BertPooler);

struct BertModelImpl : torch::nn::Module {
  explicit BertModelImpl(const BertConfig& config = {});

  /// Takes integers {batch, length}: the tokens; `mask`, 1 for tokens and 0 for padding (no padding unless given); and `types`, 0 for the
  /// first text and 1 for the second (all 0 unless given). Returns the hidden states of the last layer, {batch, length, hidden_size}, and
  /// the pooled output, {batch, hidden_size}, which is computed from the state of the first token.
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& tokens, const at::Tensor& mask = {}, const at::Tensor& types = {});

  /// Returns the replacements that turn names in files into names of this model: files of larger models have "bert." before the names, and
  /// old files have names of TensorFlow.
  static Renames renames();

  Called<BertEmbeddings> embeddings{nullptr};
  Called<BertEncoder> encoder{nullptr};
  Called<BertPooler> pooler{nullptr};
};
TORCH_MODULE(BertModel);

struct BertForSequenceClassificationImpl : torch::nn::Module {
  explicit BertForSequenceClassificationImpl(const BertConfig& config = {});

  /// Takes the inputs of BertModel, and returns scores {batch, num_labels}.
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& mask = {}, const at::Tensor& types = {});

  /// Returns the replacements that turn names in files into names of this model: files of a BertModel lack "bert." before the names.
  static Renames renames();

  Called<BertModel> bert{nullptr};
  Called<torch::nn::Dropout> dropout{nullptr};
  torch::nn::Linear classifier{nullptr};
};
TORCH_MODULE(BertForSequenceClassification);

}  // namespace tessera::models
