// Decoders like Llama: Llama, Mistral, Mixtral, Qwen 2 and 3, Qwen-MoE, SmolLM, Gemma 2 and 3, Phi 3 and 4. They have
// the parameters and names of Hugging Face's transformers, and compute the same numbers.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/models/experts.h"
#include "tessera/models/llama_config.h"
#include "tessera/nn/linear_cross_entropy.h"
#include "tessera/nn/rms_norm.h"
#include "tessera/shard/call.h"

namespace tessera::models {

/// Keys and values of tokens that a model has seen, for the tokens that follow. A forward pass with the cache appends the keys and values
/// of its tokens.
class LlamaCache {
 public:
  /// For texts of up to `longest` tokens.
  explicit LlamaCache(int64_t longest) : longest_(longest) {}

  int64_t length() const { return length_; }
  int64_t longest() const { return longest_; }
  /// Forgets all tokens but the first `length`; all tokens if their keys depend on the length of the text, so read length() afterwards.
  void keep(int64_t length) {
    if (length >= length_) return;
    length_ = tokens_.defined() ? 0 : length;
    tokens_ = at::Tensor();
  }

 private:
  friend struct LlamaAttentionImpl;
  friend struct LlamaModelImpl;
  struct Layer {
    at::Tensor keys, values;  // {batch, heads, room, size}; the room grows up to `longest`
  };
  int64_t longest_, length_ = 0;
  at::Tensor tokens_ = {};  // all of them, for models whose rotary embeddings change with the length
  std::vector<Layer> layers_ = {};
};

/// Optional inputs of a pass besides its tokens.
struct LlamaInput {
  /// Integers {batch, length}, for several documents in one row: the place of each token in its document, from 0 on. Tokens see
  /// only tokens of their own document.
  at::Tensor positions = {};
  LlamaCache* cache = nullptr;  // not together with positions
  RouterScores router_scores = nullptr;  // if not null, the pass stores the scores of its experts' routers there
  at::Tensor counted = {};               // {batch, length}: which tokens count in balance_loss(); all unless given
};

/// Values that all layers of a pass share.
struct LlamaPass {
  nn::RotaryTable table, local_table = {};  // the second is that of sliding layers, if they have their own
  at::Tensor mask = {}, sliding_mask = {};  // undefined: each token sees itself and the earlier tokens of its document
  at::Tensor places = {};                   // {length}: this pass's tokens in the cache; undefined unless the whole cache is read
  std::vector<std::vector<int64_t>> documents =
      {};  // the lengths of the documents in each row, if a row has several and positions are on the host
  LlamaCache* cache = nullptr;
  RouterScores router_scores = nullptr;
};

struct LlamaAttentionImpl : torch::nn::Module {
  LlamaAttentionImpl(const LlamaConfig& config, int64_t layer);
  at::Tensor forward(const at::Tensor& states, const std::shared_ptr<const LlamaPass>& pass);

  int64_t layer, head_size;
  bool rotates, slides;
  double dropout, softcap;
  std::optional<double> scale = {};
  std::vector<int64_t> widths;                                          // of queries, keys and values
  torch::nn::Linear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr};  // these three, or
  torch::nn::Linear qkv_proj{nullptr};                                  // this, if the model fuses projections
  torch::nn::Linear o_proj{nullptr};
  nn::RmsNorm q_norm{nullptr}, k_norm{nullptr};  // null in most families
};
TORCH_MODULE(LlamaAttention);

struct LlamaMLPImpl : torch::nn::Module {
  explicit LlamaMLPImpl(const LlamaConfig& config);
  at::Tensor forward(const at::Tensor& states);

  bool is_gemma;
  torch::nn::Linear gate_proj{nullptr}, up_proj{nullptr};  // these two, or
  torch::nn::Linear gate_up_proj{nullptr};                 // this, if the model fuses projections
  torch::nn::Linear down_proj{nullptr};
};
TORCH_MODULE(LlamaMLP);

struct LlamaDecoderLayerImpl : torch::nn::Module {
  LlamaDecoderLayerImpl(const LlamaConfig& config, int64_t layer);
  at::Tensor forward(const at::Tensor& states, const std::shared_ptr<const LlamaPass>& pass);

  Called<nn::RmsNorm> input_layernorm{nullptr}, post_attention_layernorm{nullptr};
  Called<nn::RmsNorm> pre_feedforward_layernorm{nullptr}, post_feedforward_layernorm{nullptr};  // null unless the model is a Gemma
  Called<LlamaAttention> self_attn{nullptr};
  Called<LlamaMLP> mlp{nullptr};          // null if the layer has experts
  Called<LlamaExperts> experts{nullptr};  // "mlp", or in mixtral "block_sparse_moe"
};
TORCH_MODULE(LlamaDecoderLayer);

struct LlamaModelImpl : torch::nn::Module {
  explicit LlamaModelImpl(const LlamaConfig& config);

  /// Takes tokens {batch, length} and returns the states of the last layer, normalised: {batch, length, hidden_size}. A text that is longer
  /// than the model's max_position_embeddings is an error.
  at::Tensor forward(const at::Tensor& tokens, const LlamaInput& input = {});

  LlamaConfig config;
  double neftune_alpha = 0;  // NEFTune: in training, adds noise of at most alpha / sqrt(length * hidden_size) to embeddings
  Called<torch::nn::Embedding> embed_tokens{nullptr};
  torch::nn::ModuleList layers;
  Called<nn::RmsNorm> norm{nullptr};
};
TORCH_MODULE(LlamaModel);

struct LlamaForCausalLMImpl : torch::nn::Module {
  explicit LlamaForCausalLMImpl(const LlamaConfig& config);

  /// Returns scores {batch, length, vocab_size}.
  at::Tensor forward(const at::Tensor& tokens, const LlamaInput& input = {});
  /// Returns the scores of states that `model` has returned.
  at::Tensor scores(const at::Tensor& states);
  /// Returns the mean cross entropy of `targets`, {batch, length}: the token that follows each token, or -100 where no token is to be
  /// learned. The scores are never in memory as a whole. With ExpertOptions::output_router_logits, balance_loss() is added.
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets, const nn::LinearCrossEntropy& options = {},
                  const LlamaInput& input = {});
  /// Returns the cross entropy of each target, {batch, length}, for losses of other kinds; 0 where the target is -100. balance_loss() has
  /// no place in it, because it is one number for all tokens: who wants it gives LlamaInput::router_scores, and adds it to the loss.
  at::Tensor losses(const at::Tensor& tokens, const at::Tensor& targets, const nn::LinearCrossEntropy& options = {},
                    const LlamaInput& input = {});
  /// The same for states that `model` has returned, or some of them: {..., hidden_size}. `targets`: {...}.
  at::Tensor losses_of(const at::Tensor& states, const at::Tensor& targets, const nn::LinearCrossEntropy& options = {});

  /// Returns names in other programs' files that this model lacks, for WeightsOptions::may_be_unknown.
  std::vector<std::string> surplus_names() const;

  LlamaModel model{nullptr};
  torch::nn::Linear lm_head{nullptr};  // null if the embeddings are also the head

 private:
  using Entropy = decltype(nn::linear_cross_entropy);
  at::Tensor entropy(Entropy* entropy, const at::Tensor& states, const at::Tensor& targets, const nn::LinearCrossEntropy& options);
};
TORCH_MODULE(LlamaForCausalLM);

}  // namespace tessera::models
