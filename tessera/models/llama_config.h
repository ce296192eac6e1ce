// The shape of a decoder like Llama, as a Hugging Face folder describes it in config.json.
#pragma once

#include <ATen/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "tessera/nn/rotary.h"

namespace tessera::models {

/// Members have the names of the keys in config.json of qwen2_moe; mixtral has other names for some of them.
struct ExpertOptions {
  int64_t num_experts = 8;
  int64_t num_experts_per_tok = 2;
  int64_t intermediate_size = 0;                // of an expert: moe_intermediate_size
  int64_t shared_expert_intermediate_size = 0;  // of the expert that all tokens use; 0: there is none
  int64_t decoder_sparse_step = 1;              // 2: every second layer has experts
  std::vector<int64_t> mlp_only_layers = {};    // layers that have none
  bool norm_topk_prob = true;                   // whether the weights of a token's experts are divided by their sum
  bool output_router_logits = false;            // whether the loss includes router_aux_loss_coef * balance_loss()
  double router_aux_loss_coef = 0.001;

  bool operator==(const ExpertOptions&) const = default;
};

/// Members have the names of the keys in config.json. `model_type` is one of llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe,
/// smollm3, gemma2, gemma3_text and phi3 (which Phi 4 has, too).
struct LlamaConfig {
  std::string model_type = "llama";
  int64_t vocab_size = 32000;
  int64_t hidden_size = 4096;
  int64_t intermediate_size = 11008;
  int64_t num_hidden_layers = 32;
  int64_t num_attention_heads = 32;
  std::optional<int64_t> num_key_value_heads = {};  // num_attention_heads unless given
  std::optional<int64_t> head_dim = {};             // hidden_size / num_attention_heads unless given
  int64_t max_position_embeddings = 2048;           // tokens in the longest text
  double rms_norm_eps = 1e-6;
  double initializer_range = 0.02;
  double attention_dropout = 0;
  bool attention_bias = false, mlp_bias = false;
  bool tie_word_embeddings = false;  // whether the output head shares the matrix of embeddings
  nn::RotaryOptions rope = {};       // rope_parameters, or rope_theta and rope_scaling
  std::vector<int64_t> no_rope_layers =
      {};  // 0 for a layer without rotary embeddings, 1 for other layers; empty: all layers have rotary embeddings
  /// How many tokens a token sees, itself included, in layers whose entry in layer_types is "sliding_attention".
  std::optional<int64_t> sliding_window = {};
  std::vector<std::string> layer_types = {};  // "full_attention" or "sliding_attention"; empty: "full_attention" for all layers
  std::optional<int64_t> query_pre_attn_scalar = {};      // scores are divided by its root; head_size() unless given
  std::optional<double> attn_logit_softcapping = {};      // scores of attention become cap * tanh(score / cap)
  std::optional<double> final_logit_softcapping = {};     // and so do those of tokens
  std::optional<double> rope_local_base_freq = {};        // rope_theta of sliding layers, whose rotary embeddings have no scaling
  std::optional<int64_t> bos_token_id = {};
  std::optional<int64_t> pad_token_id = {};  // its embedding gets no gradient from inputs, as in transformers
  std::vector<int64_t> eos_token_ids = {};   // eos_token_id; a text ends after one of these tokens
  std::optional<ExpertOptions> experts = {};  // for mixtral, qwen2_moe and qwen3_moe

  int64_t key_value_heads() const { return num_key_value_heads.value_or(num_attention_heads); }
  int64_t head_size() const { return head_dim.value_or(hidden_size / num_attention_heads); }
  /// Norms also after attention and MLP, and all norms as distances from 1; gelu for silu; embeddings times the root of hidden_size.
  bool is_gemma() const { return model_type.starts_with("gemma"); }
  bool biases_heads() const { return attention_bias || model_type.starts_with("qwen2"); }  // in the projections to queries, keys and values
  bool norms_heads() const { return model_type.starts_with("qwen3") || model_type == "gemma3_text"; }  // queries and keys
  bool fuses_projections() const { return model_type == "phi3"; }  // queries, keys and values are one; so are gate and up
  bool slides(int64_t layer) const;
  bool has_experts(int64_t layer) const;
  bool rotates(int64_t layer) const { return no_rope_layers.empty() || no_rope_layers[static_cast<size_t>(layer)] != 0; }

  /// Reads config.json of the folder, as transformers 5 or earlier versions write it. Throws IoError if the file can't be read or is
  /// damaged, and ConfigError, which names the key, if it describes a model that Tessera does not have.
  static LlamaConfig read(const std::filesystem::path& folder);

  /// Writes config.json so that transformers reads it, before and after version 5. `dtype` is the dtype of the weights in the folder.
  void write(const std::filesystem::path& folder, at::ScalarType dtype = at::kFloat) const;

  bool operator==(const LlamaConfig&) const = default;
};

/// Returns the configuration. Throws ConfigError, which names the key, for sizes that no model can have.
const LlamaConfig& expect_sense(const LlamaConfig& config);

}  // namespace tessera::models
