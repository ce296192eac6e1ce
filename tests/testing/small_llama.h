// Small models like Llama in folders of the Hub, with a tokenizer.
#pragma once

#include <torch/torch.h>

#include <filesystem>
#include <string>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/self/self.h"
#include "tessera/data/tokenizer.h"
#include "tessera/data/tokenizer_core.h"
#include "tessera/models/llama.h"

namespace tessera::testing {

/// A tokenizer of all bytes and one special token.
inline data::Tokenizer small_tokenizer(const std::string& pre = "llama3") {
  data::BpeVocabulary vocabulary{
      .tokens = {}, .merges = {"a b"}, .added = {257}, .special = {257}, .pre = pre, .bos = 257, .add_bos = true};
  for (int byte = 0; byte < 256; byte++) vocabulary.tokens.push_back(data::letter_of(byte));
  vocabulary.tokens.insert(vocabulary.tokens.end(), {"ab", "<|begin_of_text|>"});
  return data::Tokenizer(vocabulary);
}

/// SentencePiece's vocabulary of a few words and all bytes, of the kind llama or t5.
inline data::BpeVocabulary small_pieces(const std::string& model = "llama") {
  data::BpeVocabulary vocabulary{
      .tokens = {"<unk>", "<s>", "</s>"}, .merges = {}, .added = {0, 1, 2}, .special = {0, 1, 2}, .pre = {}, .bos = 1, .eos = 2, .model = model};
  vocabulary.unknown = 0;
  (model == "llama" ? vocabulary.add_bos : vocabulary.add_eos) = true;
  vocabulary.spaces = {.added = true, .merged = model == "t5"};
  for (int byte = 0; byte < 256; byte++) vocabulary.tokens.push_back(data::piece_of_byte(static_cast<uint8_t>(byte)));
  vocabulary.scores.resize(vocabulary.tokens.size());
  double score = 0;
  for (const auto* piece : {"th", "the", "\u2581the", "\u2581t", "he", "\u2581", "t", "h", "e", "n"}) {
    vocabulary.tokens.emplace_back(piece);
    vocabulary.scores.push_back(score--);
  }
  return vocabulary;
}

inline models::LlamaConfig small_config(const std::string& type) {
  models::LlamaConfig config{.model_type = type,
                             .vocab_size = 260,
                             .hidden_size = 64,
                             .intermediate_size = 96,
                             .num_hidden_layers = 2,
                             .num_attention_heads = 4,
                             .num_key_value_heads = 2,
                             .head_dim = 16,
                             .max_position_embeddings = 16384,
                             .initializer_range = 0.2,
                             .tie_word_embeddings = type == "qwen3" || type.starts_with("gemma"),
                             .bos_token_id = 257,
                             .eos_token_ids = {256}};
  if (type == "llama") config.rope = {.theta = 5e5, .llama3 = nn::Llama3Scaling{}};
  if (type == "smollm3") config.no_rope_layers = {1, 1};
  if (config.is_gemma() || type == "phi3") {
    config.sliding_window = 3;
    config.layer_types = {"sliding_attention", type == "gemma2" ? "full_attention" : "sliding_attention"};
    config.pad_token_id = 0;
  }
  if (config.is_gemma()) config.query_pre_attn_scalar = 16;
  if (type == "gemma2") config.attn_logit_softcapping = 50, config.final_logit_softcapping = 30;
  if (type == "gemma3_text") config.rope = {.theta = 1e6, .factor = 8}, config.rope_local_base_freq = 10000;
  if (type == "phi3") {
    config.rope = {.partial_rotary_factor = 0.5, .longrope = nn::LongRopeScaling{{1, 1.1, 1.3, 1.5}, {1.2, 3, 8, 16}, 4096}};
    config.rope.attention_factor = nn::usual_attention_factor(config.rope, config.max_position_embeddings);
  }
  if (type == "mixtral") config.experts = {.num_experts = 12, .intermediate_size = 96};
  if (type.ends_with("moe")) config.experts = {.num_experts = 4, .intermediate_size = 32, .norm_topk_prob = type == "qwen3_moe"};
  if (type == "qwen2_moe") config.experts->shared_expert_intermediate_size = 64;
  return config;
}

/// Writes a folder of the Hub with random weights.
inline models::LlamaForCausalLM write_model(const std::filesystem::path& folder, const models::LlamaConfig& config) {
  torch::manual_seed(2);
  models::LlamaForCausalLM model(config);
  {
    const torch::NoGradGuard no_grad;
    for (const auto& parameter : model->parameters()) parameter.add_(at::randn_like(parameter) * 0.1);
  }
  config.write(folder);
  small_tokenizer(config.model_type.starts_with("qwen") ? "qwen2" : config.model_type == "smollm3" ? "smollm" : "llama3").write(folder);
  checkpoint::save(folder / "weights", {.model = &*model}, self_world(), {.format = checkpoint::Format::Hub});
  std::filesystem::rename(folder / "weights" / "model.safetensors", folder / "model.safetensors");
  return model;
}

}  // namespace tessera::testing
