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
                             .tie_word_embeddings = type == "qwen3",
                             .bos_token_id = 257,
                             .eos_token_ids = {256}};
  if (type == "llama") config.rope = {.theta = 5e5, .llama3 = nn::Llama3Scaling{}};
  if (type == "smollm3") config.no_rope_layers = {1, 1};
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
