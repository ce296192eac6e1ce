// Reads the shape of a language model from the metadata of a GGUF file, and writes it there.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/stored/catalogs.h"
#include "tessera/llm/gguf_model.h"
#include "tessera/llm/gguf_parts.h"

namespace tessera::llm {
namespace {

namespace fs = std::filesystem;
using checkpoint::GgufFile;
using checkpoint::GgufMetadata;
using checkpoint::kLongFactors;
using checkpoint::kRopeFactors;
using checkpoint::kShortFactors;
using models::LlamaConfig;

/// model_type in config.json, and general.architecture.
constexpr std::pair<std::string_view, std::string_view> kKinds[] = {
    {"llama", "llama"}, {"mistral", "llama"},     {"mixtral", "llama"},   {"qwen2", "qwen2"},   {"qwen2_moe", "qwen2moe"},
    {"qwen3", "qwen3"}, {"qwen3_moe", "qwen3moe"}, {"smollm3", "smollm3"}, {"gemma2", "gemma2"}, {"gemma3_text", "gemma3"},
    {"phi3", "phi3"}};
/// The sizes that every file has, in the order in which files are written.
constexpr std::pair<const char*, int64_t LlamaConfig::*> kSizes[] = {{"context_length", &LlamaConfig::max_position_embeddings},
                                                                     {"embedding_length", &LlamaConfig::hidden_size},
                                                                     {"block_count", &LlamaConfig::num_hidden_layers},
                                                                     {"feed_forward_length", &LlamaConfig::intermediate_size},
                                                                     {"attention.head_count", &LlamaConfig::num_attention_heads}};
constexpr std::pair<const char*, std::optional<double> LlamaConfig::*> kCaps[] = {
    {"attn_logit_softcapping", &LlamaConfig::attn_logit_softcapping}, {"final_logit_softcapping", &LlamaConfig::final_logit_softcapping}};

constexpr double kLocalTheta = 10000;  // of sliding layers of Gemma 3
/// The divisor of scores in llama.cpp, which knows the largest Gemmas by their number of layers.
int64_t attention_scalar(const LlamaConfig& config) {
  const bool is_largest = config.num_hidden_layers == (config.model_type == "gemma2" ? 46 : 62);
  return is_largest ? config.hidden_size / config.num_attention_heads : config.head_size();
}

/// Returns layer_types as llama.cpp has them for the architectures with a sliding window. The files have the window alone.
std::vector<std::string> layers_of_window(const LlamaConfig& config) {
  const auto full_each = config.model_type == "gemma2" ? 2 : config.is_gemma() ? 6 : 0;
  std::vector<std::string> types;
  for (int64_t layer = 0; layer < config.num_hidden_layers; layer++)
    types.emplace_back(full_each > 0 && (layer + 1) % full_each == 0 ? "full_attention" : "sliding_attention");
  return types;
}

bool has_window(const LlamaConfig& config) {
  return config.is_gemma() || config.model_type == "phi3";
}

/// Whether llama.cpp rotates this layer's queries and keys.
bool rotates_there(const LlamaConfig& config, int64_t layer) {
  return config.model_type != "smollm3" || (layer + 1) % 4 != 0;
}

/// Returns the scaling that gives these factors. Files have only one factor for each frequency, so this takes the largest as
/// Llama3Scaling::factor, and the usual values for the other three members.
nn::Llama3Scaling scaling_of(const at::Tensor& factors, LlamaConfig config, const fs::path& path) {
  const auto refused = ConfigError("{}: {} has factors other than those of Llama 3.1 to 3.3, which is not read here", path, kRopeFactors);
  if (2 * factors.numel() != nn::rotary_size(config.rope, config.head_size())) throw refused;
  nn::Llama3Scaling scaling{.factor = std::round(factors.max().item<double>() * 1e3) / 1e3};  // the factors were computed in float32
  config.rope.llama3 = scaling;
  const auto ours = rope_factors(config);
  if (!at::allclose(ours, factors, 1e-3)) throw refused;
  return scaling;
}

std::vector<double> meant_numbers(const at::Tensor& values) {
  std::vector<double> numbers;
  for (int64_t i = 0; i < values.numel(); i++) numbers.push_back(as_meant(values.flatten()[i].item<double>()));
  return numbers;
}

/// Whether llama.cpp divides the weights of a token's experts by their sum, for which files have no key.
bool normalises_experts(std::string_view architecture) {
  return architecture != "qwen2moe";
}

/// Reads what a file says of experts. `rows_of(tensor)`: the rows of a tensor of layer 0; 0 if the file lacks it.
void read_experts(const GgufFile& file, const std::string& architecture, LlamaConfig& config, const auto& rows_of) {
  const auto count = file.integer(architecture + ".expert_count").value_or(0);
  const bool needs = architecture.ends_with("moe");
  if (count == 0 && !needs) return;
  const auto used = file.integer(architecture + ".expert_used_count");
  if (count < 1 || !used) throw ConfigError("{} has no {}.{}", file.path(), architecture, used ? "expert_count" : "expert_used_count");
  const bool is_mixtral = architecture == "llama";
  if (is_mixtral) config.model_type = "mixtral";
  config.experts = {.num_experts = count,
                    .num_experts_per_tok = *used,
                    .intermediate_size = rows_of(is_mixtral ? "block_sparse_moe.experts.0.w1.weight" : "mlp.experts.0.gate_proj.weight"),
                    .shared_expert_intermediate_size = rows_of("mlp.shared_expert.gate_proj.weight"),
                    .norm_topk_prob = normalises_experts(architecture)};
}

}  // namespace

std::string architecture_of(const LlamaConfig& config) {
  for (const auto& [type, name] : kKinds) {
    if (type == config.model_type) return std::string(name);
  }
  return config.model_type;
}

std::string known_architecture(const GgufFile& file) {
  std::vector<std::string_view> names;
  for (const auto& [type, name] : kKinds) {
    if (names.empty() || names.back() != name) names.push_back(name);
  }
  auto architecture = file.architecture();
  if (std::ranges::find(names, architecture) == names.end())
    throw ConfigError("{}: general.architecture: '{}' is not one of the architectures of models::Llama...: {}", file.path(), architecture,
                      joined(names));
  return architecture;
}

at::Tensor rope_factors(const LlamaConfig& config) {
  const auto at_one = at::ones({1, 1}, at::kLong);  // position 1, where the angle is equal to the frequency
  auto plain = config.rope;
  plain.llama3.reset();
  plain.factor = 1;
  const auto angle = [&](const nn::RotaryOptions& rope) {
    const auto table = nn::rotary_table(rope, config.head_size(), at_one);
    return at::atan2(table.sin, table.cos).flatten();
  };
  return angle(plain) / angle(config.rope);
}

LlamaConfig config_in_gguf(const fs::path& path) {
  const GgufFile file(path);
  if (file.is_adapter()) throw ConfigError("{} holds an adapter and no model; give the model that it was trained on", path);
  const checkpoint::CatalogReader stored(checkpoint::read_gguf(file));
  const auto architecture = known_architecture(file);
  const auto key = [&](std::string_view name) { return fmt::format("{}.{}", architecture, name); };
  const auto needed = [&](std::string_view name) {
    const auto value = file.integer(key(name));
    if (!value) throw ConfigError("{} has no {}", path, key(name));
    if (*value < 1) throw ConfigError("{}: {} is {}, but must be at least 1", path, key(name), *value);
    return *value;
  };
  const auto has = [&](const std::string& tensor) { return stored.catalog().tensors.contains(tensor); };
  const auto* const kind = std::ranges::find(kKinds, architecture, [](const auto& each) { return each.second; });
  LlamaConfig config{.model_type = std::string(kind->first),
                     .num_key_value_heads = file.integer(key("attention.head_count_kv")),
                     .head_dim = file.integer(key("attention.key_length")),
                     .attention_bias = !architecture.starts_with("qwen2") && has("model.layers.0.self_attn.q_proj.bias"),
                     .mlp_bias = has("model.layers.0.mlp.up_proj.bias"),
                     .tie_word_embeddings = !has("lm_head.weight")};
  for (const auto& [name, member] : kSizes) config.*member = needed(name);
  if (has("model.embed_tokens.weight")) {
    const auto& shape = stored.info("model.embed_tokens.weight").shape;
    if (shape.size() != 2) throw ConfigError("{}: token_embd.weight is not a matrix", path);
    config.vocab_size = shape.front();
  }
  if (config.num_hidden_layers > std::ssize(stored.catalog().tensors))
    throw ConfigError("{}: {} is {}, but there are only {} tensors", path, key("block_count"), config.num_hidden_layers,
                      stored.catalog().tensors.size());
  config.rms_norm_eps = as_meant(file.number(key("attention.layer_norm_rms_epsilon")).value_or(config.rms_norm_eps));
  config.rope.theta = as_meant(file.number(key("rope.freq_base")).value_or(config.rope.theta));
  if (const auto turned = file.integer(key("rope.dimension_count")); turned && *turned != config.head_size())
    config.rope.partial_rotary_factor = static_cast<double>(*turned) / static_cast<double>(config.head_size());
  const auto original = file.integer(key("rope.scaling.original_context_length")).value_or(config.max_position_embeddings);
  if (const auto type = file.text(key("rope.scaling.type")); type && *type != "none") {
    if (*type != "linear" && *type != "yarn" && *type != "longrope")
      throw ConfigError("{}: {}: '{}' is not read here", path, key("rope.scaling.type"), *type);
    const auto factor = as_meant(file.number(key("rope.scaling.factor")).value_or(1));
    if (*type == "linear") config.rope.factor = factor;
    if (*type == "yarn") config.rope.yarn = {.factor = factor, .original_max_position_embeddings = original};
  }
  if (const auto longs = checkpoint::read_gguf_tensor(file, kLongFactors); longs.defined()) {
    const auto shorts = checkpoint::read_gguf_tensor(file, kShortFactors);
    if (!shorts.defined()) throw ConfigError("{} has {}, but no {}", path, kLongFactors, kShortFactors);
    config.rope.longrope = {
        .short_factor = meant_numbers(shorts), .long_factor = meant_numbers(longs), .original_max_position_embeddings = original};
  }
  config.rope.attention_factor = nn::usual_attention_factor(config.rope, config.max_position_embeddings);
  if (has_window(config)) {
    config.sliding_window = file.integer(key("attention.sliding_window"));
    if (config.sliding_window == 0) config.sliding_window.reset();
    if (config.sliding_window) config.layer_types = layers_of_window(config);
  }
  if (config.is_gemma()) {
    config.query_pre_attn_scalar = attention_scalar(config);
    if (architecture == "gemma2") config.attn_logit_softcapping = 50, config.final_logit_softcapping = 30;
    for (const auto& [name, member] : kCaps) {
      if (const auto cap = file.number(key(name))) config.*member = as_meant(*cap);
    }
    if (architecture == "gemma3") config.rope_local_base_freq = kLocalTheta;
  }
  if (architecture == "smollm3") {
    for (int64_t layer = 0; layer < config.num_hidden_layers; layer++) config.no_rope_layers.push_back(rotates_there(config, layer) ? 1 : 0);
  }
  if (const auto factors = checkpoint::read_gguf_tensor(file, kRopeFactors); factors.defined())
    config.rope.llama3 = scaling_of(factors.flatten(), config, path);
  read_experts(file, architecture, config, [&](const std::string& tensor) {
    const auto name = "model.layers.0." + tensor;
    return has(name) ? stored.info(name).shape.front() : 0;
  });
  config.bos_token_id = file.integer("tokenizer.ggml.bos_token_id");
  config.pad_token_id = file.integer("tokenizer.ggml.padding_token_id");
  for (const auto* end : {"eos", "eot"}) {
    const auto id = file.integer(fmt::format("tokenizer.ggml.{}_token_id", end));
    if (id && std::ranges::find(config.eos_token_ids, *id) == config.eos_token_ids.end()) config.eos_token_ids.push_back(*id);
  }
  try {
    expect_sense(config);
  } catch (const ConfigError&) {
    std::rethrow_exception(with_context(path.string() + ": "));
  }
  return config;
}

void add_config(GgufMetadata& metadata, const LlamaConfig& config) {
  const auto add = [&](std::string_view name, checkpoint::GgufValue value) {
    metadata.emplace_back(fmt::format("{}.{}", architecture_of(config), name), std::move(value));
  };
  add("vocab_size", u32(config.vocab_size));
  for (const auto& [name, member] : kSizes) add(name, u32(config.*member));
  add("attention.head_count_kv", u32(config.key_value_heads()));
  add("attention.key_length", u32(config.head_size()));
  add("attention.value_length", u32(config.head_size()));
  add("attention.layer_norm_rms_epsilon", f32(config.rms_norm_eps));
  add("rope.dimension_count", u32(nn::rotary_size(config.rope, config.head_size())));
  add("rope.freq_base", f32(config.rope.theta));
  if (const auto& yarn = config.rope.yarn) {
    add("rope.scaling.type", text("yarn"));
    add("rope.scaling.factor", f32(yarn->factor));
    add("rope.scaling.original_context_length", u32(yarn->original_max_position_embeddings));
  } else if (const auto& longrope = config.rope.longrope) {
    add("rope.scaling.original_context_length", u32(longrope->original_max_position_embeddings));
    add("rope.scaling.attn_factor", f32(config.rope.attention_factor));
  } else if (config.rope.factor != 1 && !config.rope.llama3) {
    add("rope.scaling.type", text("linear"));
    add("rope.scaling.factor", f32(config.rope.factor));
  }
  if (has_window(config)) add("attention.sliding_window", u32(config.sliding_window.value_or(0)));
  for (const auto& [name, member] : kCaps) {
    if (config.*member) add(name, f32(*(config.*member)));
  }
  if (!config.experts) return;
  add("expert_count", u32(config.experts->num_experts));
  add("expert_used_count", u32(config.experts->num_experts_per_tok));
  if (config.model_type == "mixtral") return;
  add("expert_feed_forward_length", u32(config.experts->intermediate_size));
  if (config.experts->shared_expert_intermediate_size > 0)
    add("expert_shared_feed_forward_length", u32(config.experts->shared_expert_intermediate_size));
}

void expect_gguf_place(const LlamaConfig& config, const data::Tokenizer& tokenizer, const fs::path& model) {
  const auto refuse = [&](const std::string& why) { throw ConfigError("{} can't become a GGUF file: {}", model, why); };
  if (config.rope.partial_rotary_factor != 1 && config.model_type != "phi3") refuse("partial_rotary_factor has no place there");
  if (const auto& yarn = config.rope.yarn; yarn && (config.rope.attention_factor != nn::usual_attention_factor(config.rope, 1) ||
                                                    yarn->beta_fast != 32 || yarn->beta_slow != 1 || !yarn->truncate))
    refuse("of yarn, only factor and original_max_position_embeddings have a place there");
  if (config.is_gemma() && config.query_pre_attn_scalar.value_or(config.head_size()) != attention_scalar(config))
    refuse(fmt::format("llama.cpp takes a query_pre_attn_scalar of {} for this shape", attention_scalar(config)));
  if (config.rope_local_base_freq.value_or(kLocalTheta) != kLocalTheta) refuse("llama.cpp takes a rope_local_base_freq of 10000");
  if (has_window(config) && config.sliding_window && config.layer_types != layers_of_window(config))
    refuse("llama.cpp has other layers with a sliding window than layer_types");
  for (int64_t layer = 0; layer < config.num_hidden_layers; layer++) {
    if (!has_window(config) && config.slides(layer) && *config.sliding_window < config.max_position_embeddings)
      refuse(fmt::format("sliding_window {} has no place there; with max_position_embeddings {} in config.json it would have no effect",
                         *config.sliding_window, *config.sliding_window));
    if (config.rotates(layer) != rotates_there(config, layer))
      refuse(
          "llama.cpp leaves rotary embeddings out of every fourth layer of smollm3 and of no other model, but no_rope_layers says "
          "otherwise");
  }
  if (const auto& experts = config.experts) {
    if (experts->norm_topk_prob != normalises_experts(architecture_of(config)))
      refuse(fmt::format("llama.cpp takes norm_topk_prob for {} in {}", !experts->norm_topk_prob, config.model_type));
    for (int64_t layer = 0; layer < config.num_hidden_layers; layer++) {
      if (!config.has_experts(layer)) refuse(fmt::format("llama.cpp expects experts in every layer, and layer {} has none", layer));
    }
  }
  if (tokenizer.size() > config.vocab_size)
    refuse(fmt::format("its tokenizer has {} tokens, but the model only {}", tokenizer.size(), config.vocab_size));
  data::BpeVocabulary vocabulary;
  try {
    vocabulary = tokenizer.vocabulary();
  } catch (const ConfigError& error) {
    refuse(error.what());
  }
  if (!vocabulary.rstrip.empty() && config.model_type != "phi3") refuse("rstrip of added tokens has no place there");
}

}  // namespace tessera::llm
