#include "tessera/models/bert.h"

#include <ATen/ATen.h>
#include <torch/nn/init.h>

#include "tessera/base/error.h"
#include "tessera/nn/linear.h"

namespace tessera::models {
namespace {

using torch::nn::Dropout, torch::nn::Embedding, torch::nn::EmbeddingOptions, torch::nn::Linear;

Linear make_linear(int64_t inputs, int64_t outputs, const BertConfig& config) {
  Linear linear(inputs, outputs);
  torch::nn::init::normal_(linear->weight, 0, config.initializer_range);
  torch::nn::init::zeros_(linear->bias);
  return linear;
}

Embedding make_embedding(const EmbeddingOptions& options, const BertConfig& config) {
  Embedding embedding(options);
  torch::nn::init::normal_(embedding->weight, 0, config.initializer_range);
  const torch::NoGradGuard no_grad;
  if (options.padding_idx()) embedding->weight[*options.padding_idx()].zero_();
  return embedding;
}

torch::nn::LayerNorm make_norm(const BertConfig& config) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.hidden_size}).eps(config.layer_norm_eps));
}

/// Adds replacements for TensorFlow's names of the parameters of a norm.
Renames with_norms(Renames renames) {
  renames.insert(renames.end(), {{"LayerNorm\\.gamma$", "LayerNorm.weight"}, {"LayerNorm\\.beta$", "LayerNorm.bias"}});
  return renames;
}

}  // namespace

BertEmbeddingsImpl::BertEmbeddingsImpl(const BertConfig& config)
    : word_embeddings(register_module(
          "word_embeddings",
          make_embedding(EmbeddingOptions(config.vocab_size, config.hidden_size).padding_idx(config.pad_token_id), config))),
      position_embeddings(register_module("position_embeddings",
                                          make_embedding(EmbeddingOptions(config.max_position_embeddings, config.hidden_size), config))),
      token_type_embeddings(
          register_module("token_type_embeddings", make_embedding(EmbeddingOptions(config.type_vocab_size, config.hidden_size), config))),
      norm(register_module("LayerNorm", make_norm(config))),
      dropout(register_module("dropout", Dropout(config.hidden_dropout_prob))) {}

at::Tensor BertEmbeddingsImpl::forward(const at::Tensor& tokens, const at::Tensor& types) {
  const auto positions = at::arange(tokens.size(1), tokens.options());
  return dropout(norm(word_embeddings(tokens) + token_type_embeddings(types) + position_embeddings(positions)));
}

BertSelfAttentionImpl::BertSelfAttentionImpl(const BertConfig& config)
    : heads(config.num_attention_heads),
      dropout(config.attention_probs_dropout_prob),
      query(register_module("query", make_linear(config.hidden_size, config.hidden_size, config))),
      key(register_module("key", make_linear(config.hidden_size, config.hidden_size, config))),
      value(register_module("value", make_linear(config.hidden_size, config.hidden_size, config))) {}

at::Tensor BertSelfAttentionImpl::forward(const at::Tensor& states, const at::Tensor& mask) {
  const auto by_head = [&](const Linear& part) { return nn::linear(part, states).unflatten(2, {heads, -1}).transpose(1, 2); };
  const auto seen = mask.defined() ? std::optional(mask) : std::nullopt;
  const auto mixed = at::scaled_dot_product_attention(by_head(query), by_head(key), by_head(value), seen, is_training() ? dropout : 0.0);
  return mixed.transpose(1, 2).flatten(2);
}

BertResidual::BertResidual(int64_t inputs, const BertConfig& config)
    : dense(register_module("dense", make_linear(inputs, config.hidden_size, config))),
      norm(register_module("LayerNorm", make_norm(config))),
      dropout(register_module("dropout", Dropout(config.hidden_dropout_prob))) {}

at::Tensor BertResidual::forward(const at::Tensor& y, const at::Tensor& x) {
  return norm(dropout(nn::linear(dense, y)) + x);
}

BertAttentionImpl::BertAttentionImpl(const BertConfig& config)
    : self(register_module("self", BertSelfAttention(config))), output(register_module("output", BertSelfOutput(config))) {}

at::Tensor BertAttentionImpl::forward(const at::Tensor& states, const at::Tensor& mask) {
  return output(self(states, mask), states);
}

BertIntermediateImpl::BertIntermediateImpl(const BertConfig& config)
    : activation(config.hidden_act), dense(register_module("dense", make_linear(config.hidden_size, config.intermediate_size, config))) {}

at::Tensor BertIntermediateImpl::forward(const at::Tensor& states) {
  const auto x = nn::linear(dense, states);
  switch (activation) {
    case BertActivation::Gelu:
      return at::gelu(x);
    case BertActivation::GeluTanh:
      return at::gelu(x, "tanh");
    case BertActivation::Relu:
      return at::relu(x);
    case BertActivation::Silu:
      return at::silu(x);
  }
  throw UsageError("BertConfig::hidden_act is not a BertActivation; give one of its values");
}

BertLayerImpl::BertLayerImpl(const BertConfig& config)
    : attention(register_module("attention", BertAttention(config))),
      intermediate(register_module("intermediate", BertIntermediate(config))),
      output(register_module("output", BertOutput(config))) {}

at::Tensor BertLayerImpl::forward(const at::Tensor& states, const at::Tensor& mask) {
  const auto attended = attention(states, mask);
  return output(intermediate(attended), attended);
}

BertEncoderImpl::BertEncoderImpl(const BertConfig& config) {
  for (int64_t i = 0; i < config.num_hidden_layers; i++) layer->push_back(BertLayer(config));
  register_module("layer", layer);
}

at::Tensor BertEncoderImpl::forward(at::Tensor states, const at::Tensor& mask) {
  for (const auto& each : *layer) states = call(each->as<BertLayer>(), states, mask);
  return states;
}

BertPoolerImpl::BertPoolerImpl(const BertConfig& config)
    : dense(register_module("dense", make_linear(config.hidden_size, config.hidden_size, config))) {}

at::Tensor BertPoolerImpl::forward(const at::Tensor& states) {
  return at::tanh(nn::linear(dense, states.select(1, 0)));
}

BertModelImpl::BertModelImpl(const BertConfig& config)
    : embeddings(register_module("embeddings", BertEmbeddings(expect_sense(config)))),
      encoder(register_module("encoder", BertEncoder(config))),
      pooler(register_module("pooler", BertPooler(config))) {}

std::pair<at::Tensor, at::Tensor> BertModelImpl::forward(const at::Tensor& tokens, const at::Tensor& mask, const at::Tensor& types) {
  const auto longest = embeddings->position_embeddings->options.num_embeddings();
  if (tokens.dim() != 2 || tokens.size(1) > longest) {
    throw UsageError("BERT takes tokens {{batch, length}} with a length up to {}, not [{}]; truncate longer texts", longest,
                     joined(tokens.sizes()));
  }
  // Without a mask, a faster kernel is possible.
  const auto seen = mask.defined() ? mask.to(at::kBool).unsqueeze(1).unsqueeze(1) : at::Tensor();
  auto hidden = encoder(embeddings(tokens, types.defined() ? types : at::zeros_like(tokens)), seen);
  auto pooled = pooler(hidden);
  return {std::move(hidden), std::move(pooled)};
}

Renames BertModelImpl::renames() {
  return with_norms({{"^bert\\.", ""}});
}

BertForSequenceClassificationImpl::BertForSequenceClassificationImpl(const BertConfig& config)
    : bert(register_module("bert", BertModel(config))),
      dropout(register_module("dropout", Dropout(config.classifier_dropout.value_or(config.hidden_dropout_prob)))),
      classifier(register_module("classifier", make_linear(config.hidden_size, config.num_labels, config))) {}

at::Tensor BertForSequenceClassificationImpl::forward(const at::Tensor& tokens, const at::Tensor& mask, const at::Tensor& types) {
  return nn::linear(classifier, dropout(bert(tokens, mask, types).second));
}

Renames BertForSequenceClassificationImpl::renames() {
  return with_norms({{"^(embeddings|encoder|pooler)\\.", "bert.$1."}});
}

}  // namespace tessera::models
