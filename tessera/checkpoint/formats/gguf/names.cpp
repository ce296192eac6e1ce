// Translates the names of tensors between GGUF files and Hugging Face.
#include <fmt/format.h>

#include <algorithm>

#include "tessera/checkpoint/formats/gguf/gguf.h"

namespace tessera::checkpoint {
namespace {

struct NamePair {
  std::string_view gguf, hub;
  std::string_view of = {};  // only in architectures that begin so
};
constexpr NamePair kOfModel[] = {{"token_embd", "model.embed_tokens"}, {"output_norm", "model.norm"}, {"output", "lm_head"}};
constexpr NamePair kOfLayers[] = {{"ffn_norm", "pre_feedforward_layernorm", "gemma"},
                                  {"post_attention_norm", "post_attention_layernorm", "gemma"},
                                  {"post_ffw_norm", "post_feedforward_layernorm", "gemma"},
                                  {"attn_qkv", "self_attn.qkv_proj", "phi3"},
                                  {"ffn_up", "mlp.gate_up_proj", "phi3"},
                                  {"ffn_gate_inp", "block_sparse_moe.gate", "llama"},  // Mixtral
                                  {"ffn_gate_exps", "block_sparse_moe.experts.*.w1", "llama"},
                                  {"ffn_up_exps", "block_sparse_moe.experts.*.w3", "llama"},
                                  {"ffn_down_exps", "block_sparse_moe.experts.*.w2", "llama"},
                                  {"attn_norm", "input_layernorm"},    {"attn_q", "self_attn.q_proj"},
                                  {"attn_k", "self_attn.k_proj"},      {"attn_v", "self_attn.v_proj"},
                                  {"attn_output", "self_attn.o_proj"}, {"attn_q_norm", "self_attn.q_norm"},
                                  {"attn_k_norm", "self_attn.k_norm"}, {"ffn_norm", "post_attention_layernorm"},
                                  {"ffn_gate", "mlp.gate_proj"},       {"ffn_up", "mlp.up_proj"},
                                  {"ffn_down", "mlp.down_proj"},       {"ffn_gate_inp", "mlp.gate"},
                                  {"ffn_gate_exps", "mlp.experts.*.gate_proj"},
                                  {"ffn_up_exps", "mlp.experts.*.up_proj"},
                                  {"ffn_down_exps", "mlp.experts.*.down_proj"},
                                  {"ffn_gate_inp_shexp", "mlp.shared_expert_gate"},
                                  {"ffn_gate_shexp", "mlp.shared_expert.gate_proj"},
                                  {"ffn_up_shexp", "mlp.shared_expert.up_proj"},
                                  {"ffn_down_shexp", "mlp.shared_expert.down_proj"}};
constexpr std::string_view kLayer = "blk.", kHubLayer = "model.layers.";

/// Translates a name such as "blk.3.attn_q.weight" in parts: the layer before the stem, the stem, and ".weight" or ".bias".
std::optional<std::string> translated(std::string_view architecture, std::string_view name, std::string_view NamePair::* from,
                                      std::string_view NamePair::* to, std::string_view layer_from, std::string_view layer_to) {
  const auto dot = name.rfind('.');
  if (dot == std::string_view::npos) return {};
  const auto stem = name.substr(0, dot), end = name.substr(dot);
  const auto find = [&](const auto& table, std::string_view wanted) -> const NamePair* {
    const auto* const found =
        std::ranges::find_if(table, [&](const NamePair& pair) { return pair.*from == wanted && architecture.starts_with(pair.of); });
    return found == std::end(table) ? nullptr : found;
  };
  if (!stem.starts_with(layer_from)) {
    const auto* pair = find(kOfModel, stem);
    return pair == nullptr ? std::nullopt : std::optional(fmt::format("{}{}", pair->*to, end));
  }
  const auto rest = stem.substr(layer_from.size());
  const auto digits = rest.find_first_not_of("0123456789");
  if (digits == std::string_view::npos || digits == 0 || rest[digits] != '.') return {};
  const auto* pair = find(kOfLayers, rest.substr(digits + 1));
  if (pair == nullptr) return {};
  return fmt::format("{}{}.{}{}", layer_to, rest.substr(0, digits), pair->*to, end);
}

}  // namespace

std::optional<std::string> gguf_name(std::string_view architecture, const std::string& name) {
  auto stacked = name;
  if (const auto digits = number_of_expert(name)) stacked.replace(digits->first, digits->second, kAnyExpert);
  return translated(architecture, stacked, &NamePair::hub, &NamePair::gguf, kHubLayer, kLayer);
}
std::optional<std::string> name_of_gguf(std::string_view architecture, const std::string& gguf) {
  return translated(architecture, gguf, &NamePair::gguf, &NamePair::hub, kLayer, kHubLayer);
}

std::optional<std::pair<size_t, size_t>> number_of_expert(std::string_view name) {
  constexpr std::string_view kExperts = ".experts.";
  const auto found = name.find(kExperts);
  if (found == std::string_view::npos) return {};
  const auto begin = found + kExperts.size(), end = name.find('.', begin);
  return end == std::string_view::npos ? std::nullopt : std::optional(std::pair(begin, end - begin));
}

}  // namespace tessera::checkpoint
