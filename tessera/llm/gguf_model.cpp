#include "tessera/llm/gguf_model.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <utility>

#include "tessera/base/atomic_write.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/input_file.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/formats/gguf/gguf.h"
#include "tessera/checkpoint/stored/catalogs.h"
#include "tessera/data/tokenizer_core.h"
#include "tessera/data/unigram.h"
#include "tessera/llm/gguf_parts.h"
#include "tessera/models/config_file.h"

namespace tessera::llm {
namespace {

namespace fs = std::filesystem;
using checkpoint::GgufFile;
using checkpoint::GgufMetadata;
using checkpoint::GgufTensor;
using checkpoint::GgufType;
using checkpoint::kLongFactors;
using checkpoint::kRopeFactors;
using checkpoint::kShortFactors;
using models::LlamaConfig;

constexpr std::array<std::string_view, 9> kArchitectures = {"llama",   "qwen2",  "qwen2moe", "qwen3", "qwen3moe",
                                                            "smollm3", "gemma2", "gemma3",   "phi3"};
/// The sizes that every file has, in the order in which files are written.
constexpr std::pair<const char*, int64_t LlamaConfig::*> kSizes[] = {{"context_length", &LlamaConfig::max_position_embeddings},
                                                                     {"embedding_length", &LlamaConfig::hidden_size},
                                                                     {"block_count", &LlamaConfig::num_hidden_layers},
                                                                     {"feed_forward_length", &LlamaConfig::intermediate_size},
                                                                     {"attention.head_count", &LlamaConfig::num_attention_heads}};
// The meanings of the numbers in tokenizer.ggml.token_type.
constexpr int64_t kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6;

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

/// Returns the factors by which llama.cpp divides frequencies.
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

/// Throws ConfigError, with a way out, unless the path is a folder or a GGUF file.
void expect_model_place(const fs::path& path) {
  if (is_folder(path)) return;
  if (!is_there(path))
    throw ConfigError(
        "{}: there is no such folder or GGUF file; for a model on the Hugging Face Hub, give the folder that it was downloaded to", path);
  if (checkpoint::is_gguf_file(path)) return;
  const auto folder = path.parent_path().empty() ? fs::path(".") : path.parent_path();
  const bool has_config = is_there(folder / "config.json");
  throw ConfigError("{} is not a GGUF file; give {}", path,
                    has_config ? "its folder, " + folder.string() : "one, or a folder with config.json and tokenizer.json");
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
  config.model_type = is_mixtral ? "mixtral" : architecture == "qwen2moe" ? "qwen2_moe" : "qwen3_moe";
  config.experts = {.num_experts = count,
                    .num_experts_per_tok = *used,
                    .intermediate_size = rows_of(is_mixtral ? "block_sparse_moe.experts.0.w1.weight" : "mlp.experts.0.gate_proj.weight"),
                    .shared_expert_intermediate_size = rows_of("mlp.shared_expert.gate_proj.weight"),
                    .norm_topk_prob = normalises_experts(architecture)};
}

LlamaConfig config_of(const fs::path& path) {
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
  LlamaConfig config{.model_type = architecture == "gemma3" ? "gemma3_text" : architecture,
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
    const auto cap = [&](std::string_view name, std::optional<double> usual) {
      const auto found = file.number(key(name));
      return found ? std::optional(as_meant(*found)) : usual;
    };
    config.query_pre_attn_scalar = attention_scalar(config);
    if (architecture == "gemma2") config.attn_logit_softcapping = cap("attn_logit_softcapping", 50);
    config.final_logit_softcapping = cap("final_logit_softcapping", architecture == "gemma2" ? std::optional(30.0) : std::nullopt);
    if (architecture == "gemma3") config.rope_local_base_freq = 10000;
  }
  if (architecture == "smollm3") {
    for (int64_t layer = 0; layer < config.num_hidden_layers; layer++) config.no_rope_layers.push_back((layer + 1) % 4 != 0 ? 1 : 0);
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

/// Whether llama.cpp lets the added tokens of a model with this name take the spaces behind them, and the tokens that do not.
bool is_phi3(std::string_view name) {
  return lower(name).find("phi-3") != std::string::npos || lower(name).find("phi3") != std::string::npos;
}
bool keeps_spaces(std::string_view token) {
  return token == "<unk>" || token == "<s>" || token == "<|endoftext|>";
}

data::Tokenizer tokenizer_of(const fs::path& path) {
  const GgufFile file(path);
  const auto missing = [&](const char* key) { return ConfigError("{} has no {}", path, key); };
  const auto model = file.text("tokenizer.ggml.model");
  if (!model) throw missing("tokenizer.ggml.model");
  const bool is_gpt2 = *model == "gpt2", is_llama = *model == "llama";
  const auto *tokens = file.texts("tokenizer.ggml.tokens"), *merges = file.texts("tokenizer.ggml.merges");
  const auto* scores = file.numbers("tokenizer.ggml.scores");
  if (tokens == nullptr) throw missing("tokenizer.ggml.tokens");
  if (is_gpt2 && merges == nullptr) throw missing("tokenizer.ggml.merges");
  const auto pre = is_gpt2 ? file.text("tokenizer.ggml.pre") : "";
  if (!pre) throw missing("tokenizer.ggml.pre");
  const auto flag = [&](const char* key, bool standard) { return file.integer(fmt::format("tokenizer.ggml.{}", key)).value_or(standard) != 0; };
  data::BpeVocabulary vocabulary{.tokens = *tokens,
                                 .merges = is_gpt2 ? *merges : std::vector<std::string>(),
                                 .added = {},
                                 .special = {},
                                 .pre = *pre,
                                 .add_bos = flag("add_bos_token", is_llama || data::adds_bos(*pre)),
                                 .add_eos = flag("add_eos_token", !is_gpt2 && !is_llama),
                                 .chat_template = file.text("tokenizer.chat_template").value_or(""),
                                 .model = *model};
  if (!is_gpt2) {
    if (scores != nullptr) vocabulary.scores = *scores;
    vocabulary.spaces = {.added = flag("add_space_prefix", is_llama), .merged = flag("remove_extra_whitespaces", false)};
    if (const auto* table = file.integers("tokenizer.ggml.precompiled_charsmap")) vocabulary.spaces.charsmap.assign(table->begin(), table->end());
  }
  if (const auto* types = file.integers("tokenizer.ggml.token_type")) {
    for (size_t id = 0; id < std::min(types->size(), tokens->size()); id++) {
      const auto type = (*types)[id];
      const bool is_special = type == kControl || (type == kUnknown && !is_gpt2);
      if (is_special || type == kUserDefined) vocabulary.added.push_back(static_cast<int32_t>(id));
      if (is_special) vocabulary.special.push_back(static_cast<int32_t>(id));
    }
  }
  const auto token = [&](const char* key) {
    const auto id = file.integer(fmt::format("tokenizer.ggml.{}_token_id", key));
    return id ? std::optional(static_cast<int32_t>(*id)) : std::nullopt;
  };
  vocabulary.bos = token("bos");
  vocabulary.eos = token("eos");
  vocabulary.pad = token("padding");
  vocabulary.unknown = token("unknown");
  if (!is_gpt2) {
    // llama.cpp's standards.
    const auto standard = [&](std::optional<int32_t>& id, int32_t number) {
      if (!id && std::cmp_less(number, tokens->size())) id = number;
    };
    standard(vocabulary.unknown, is_llama ? 0 : 2);
    if (is_llama) standard(vocabulary.bos, 1);
    standard(vocabulary.eos, is_llama ? 2 : 1);
    if (is_phi3(file.text("general.name").value_or(""))) {
      for (const auto id : vocabulary.added) {
        if (!keeps_spaces((*tokens)[static_cast<size_t>(id)])) vocabulary.rstrip.push_back(id);
      }
    }
  }
  try {
    return data::Tokenizer(vocabulary);
  } catch (const ConfigError&) {
    std::rethrow_exception(with_context(path.string() + ": "));
  }
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
  if (config.attn_logit_softcapping) add("attn_logit_softcapping", f32(*config.attn_logit_softcapping));
  if (config.final_logit_softcapping) add("final_logit_softcapping", f32(*config.final_logit_softcapping));
  if (!config.experts) return;
  add("expert_count", u32(config.experts->num_experts));
  add("expert_used_count", u32(config.experts->num_experts_per_tok));
  if (config.model_type == "mixtral") return;
  add("expert_feed_forward_length", u32(config.experts->intermediate_size));
  if (config.experts->shared_expert_intermediate_size > 0)
    add("expert_shared_feed_forward_length", u32(config.experts->shared_expert_intermediate_size));
}

void add_tokenizer(GgufMetadata& metadata, const data::Tokenizer& tokenizer, const LlamaConfig& config) {
  auto vocabulary = tokenizer.vocabulary();
  std::vector<int64_t> types(static_cast<size_t>(config.vocab_size), kNormal);
  for (const auto id : vocabulary.added) types.at(static_cast<size_t>(id)) = kUserDefined;
  for (const auto id : vocabulary.special) types.at(static_cast<size_t>(id)) = kControl;
  if (vocabulary.model != "gpt2") {
    for (size_t id = 0; id < vocabulary.tokens.size(); id++)
      if (data::byte_of_piece(vocabulary.tokens[id])) types[id] = kByte;
    if (vocabulary.unknown) types.at(static_cast<size_t>(*vocabulary.unknown)) = kUnknown;
  }
  // A model's vocabulary may be larger than its tokenizer's.
  const auto vocabulary_size = static_cast<size_t>(config.vocab_size);
  vocabulary.tokens.resize(vocabulary_size);
  for (size_t id = 0; id < vocabulary.tokens.size(); id++) {
    if (!vocabulary.tokens[id].empty()) continue;
    vocabulary.tokens[id] = fmt::format("[PAD{}]", id);
    types[id] = kUnused;
  }
  const auto add = [&](const char* name, checkpoint::GgufValue value) {
    metadata.emplace_back(fmt::format("tokenizer.ggml.{}", name), std::move(value));
  };
  add("model", text(vocabulary.model));
  add("pre", text(vocabulary.pre == "llama3" ? "llama-bpe" : vocabulary.pre == "gpt2" ? "gpt-2" : vocabulary.pre.empty() ? "default" : vocabulary.pre));
  add("tokens", {GgufType::Text, std::move(vocabulary.tokens)});
  add("token_type", {GgufType::I32, std::move(types)});
  if (vocabulary.model == "gpt2") {
    add("merges", {GgufType::Text, std::move(vocabulary.merges)});
  } else {
    vocabulary.scores.resize(vocabulary_size);
    add("scores", {GgufType::F32, std::move(vocabulary.scores)});
    add("add_space_prefix", {GgufType::Bool, static_cast<int64_t>(vocabulary.spaces.added)});
    add("remove_extra_whitespaces", {GgufType::Bool, static_cast<int64_t>(vocabulary.spaces.merged)});
    const auto& table = vocabulary.spaces.charsmap;
    if (!table.empty()) add("precompiled_charsmap", {GgufType::U8, std::vector<int64_t>(table.begin(), table.end())});
    if (vocabulary.unknown) add("unknown_token_id", u32(*vocabulary.unknown));
  }
  const auto bos = vocabulary.bos ? std::optional<int64_t>(*vocabulary.bos) : config.bos_token_id;
  if (bos) add("bos_token_id", u32(*bos));
  if (vocabulary.eos || !config.eos_token_ids.empty())
    add("eos_token_id", u32(vocabulary.eos ? *vocabulary.eos : config.eos_token_ids.front()));
  if (config.eos_token_ids.size() > 1) add("eot_token_id", u32(config.eos_token_ids[1]));
  if (config.pad_token_id) add("padding_token_id", u32(*config.pad_token_id));
  add("add_bos_token", {GgufType::Bool, static_cast<int64_t>(vocabulary.add_bos)});
  if (vocabulary.add_eos || vocabulary.model == "t5") add("add_eos_token", {GgufType::Bool, static_cast<int64_t>(vocabulary.add_eos)});
  if (!vocabulary.chat_template.empty()) metadata.emplace_back("tokenizer.chat_template", text(std::move(vocabulary.chat_template)));
}

/// Returns the text of config.json with another dtype of weights.
std::string with_dtype(const std::string& text, at::ScalarType dtype) {
  auto json = nlohmann::ordered_json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return text;
  json[json.contains("dtype") ? "dtype" : "torch_dtype"] = models::name_in_config(dtype);
  return json.dump(2) + "\n";
}

const checkpoint::BlockCode* code_named(const std::string& name) {
  const auto* code = checkpoint::find_block_code(name);
  if (code == nullptr || code->encode == nullptr)
    throw UsageError("GGUF files are written as F32, F16, BF16, Q8_0, Q5_0, Q4_0 or Q4_K, not as '{}'", name);
  return code;
}

/// Returns the code for a tensor. `code` is the one that GgufOptions chooses for matrices.
const checkpoint::BlockCode* code_of(const std::string& name, const std::vector<int64_t>& sizes, const checkpoint::BlockCode* code,
                                     bool tied) {
  if (name.find("ffn_gate_inp") != std::string::npos) return code_named("F32");  // a router
  const bool is_output = name == "output.weight" || (tied && name == "token_embd.weight");
  std::vector<const checkpoint::BlockCode*> candidates = {is_output && code->bytes < code->values ? code_named("Q8_0") : code};
  if (candidates.front()->name == "Q4_K") candidates.push_back(code_named("Q5_0"));
  for (const auto* each : candidates) {
    if (sizes.size() > 1 && sizes.back() % each->values == 0) return each;
  }
  return code_named("F32");
}

}  // namespace

std::string known_architecture(const GgufFile& file) {
  auto architecture = file.architecture();
  if (std::ranges::find(kArchitectures, architecture) == kArchitectures.end())
    throw ConfigError("{}: general.architecture: '{}' is not one of the architectures of models::Llama...: {}",
                      file.path(), architecture, joined(kArchitectures));
  return architecture;
}

LlamaConfig read_config(const fs::path& path) {
  expect_model_place(path);
  return is_folder(path) ? LlamaConfig::read(path) : config_of(path);
}

data::Tokenizer read_tokenizer(const fs::path& path) {
  expect_model_place(path);
  return is_folder(path) ? data::Tokenizer::read(path) : tokenizer_of(path);
}

void expect_gguf_place(const LlamaConfig& config, const data::Tokenizer& tokenizer, const fs::path& model) {
  const auto refuse = [&](const std::string& why) { throw ConfigError("{} can't become a GGUF file: {}", model, why); };
  if (config.rope.partial_rotary_factor != 1 && config.model_type != "phi3") refuse("partial_rotary_factor has no place there");
  if (const auto& yarn = config.rope.yarn; yarn && (config.rope.attention_factor != nn::usual_attention_factor(config.rope, 1) ||
                                                    yarn->beta_fast != 32 || yarn->beta_slow != 1 || !yarn->truncate))
    refuse("of yarn, only factor and original_max_position_embeddings have a place there");
  if (config.is_gemma() && config.query_pre_attn_scalar.value_or(config.head_size()) != attention_scalar(config))
    refuse(fmt::format("llama.cpp takes a query_pre_attn_scalar of {} for this shape", attention_scalar(config)));
  if (config.rope_local_base_freq.value_or(10000) != 10000) refuse("llama.cpp takes a rope_local_base_freq of 10000");
  if (has_window(config) && config.sliding_window && config.layer_types != layers_of_window(config))
    refuse("llama.cpp has other layers with a sliding window than layer_types");
  for (int64_t layer = 0; layer < config.num_hidden_layers; layer++) {
    if (!has_window(config) && config.slides(layer) && *config.sliding_window < config.max_position_embeddings)
      refuse(fmt::format("sliding_window {} has no place there; with max_position_embeddings {} in config.json it would have no effect",
                         *config.sliding_window, *config.sliding_window));
    if (config.rotates(layer) != (config.model_type != "smollm3" || (layer + 1) % 4 != 0))
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

void write_gguf(const fs::path& folder, const fs::path& file, const GgufOptions& options) {
  const auto* code = code_named(options.code);
  if (!is_there(folder / models::kConfigFile))
    throw ConfigError(
        "a GGUF file is made of a Hugging Face folder, but {} has no config.json. `tessera ckpt convert IN FOLDER --to hub` makes such a "
        "folder of a GGUF file, and a recipe's --output makes one of a run",
        folder);
  const auto* plain = code_named("F32");
  const auto config = LlamaConfig::read(folder);
  const auto tokenizer = data::Tokenizer::read(folder);
  auto name_of_model = options.name.empty() ? name_of_folder(folder) : options.name;
  if (config.model_type == "phi3" && !is_phi3(name_of_model)) name_of_model = "Phi-3 " + name_of_model;
  expect_gguf_place(config, tokenizer, folder);
  const checkpoint::CatalogReader stored(checkpoint::read_model(folder));
  const auto architecture = architecture_of(config);
  auto metadata = general(config, "model", name_of_model, code->file_type);
  add_config(metadata, config);
  add_tokenizer(metadata, tokenizer, config);
  std::vector<GgufTensor> tensors;
  std::vector<std::vector<std::string>> names;  // of each tensor: one, or those of the experts that it stacks
  std::map<std::string, size_t> stacks;
  std::vector<at::Tensor> factors;
  const auto add_factors = [&](const char* name, const at::Tensor& values) {
    tensors.push_back({.name = name, .sizes = values.sizes().vec(), .code = plain});
    factors.push_back(values);
  };
  if (config.rope.llama3) add_factors(kRopeFactors, rope_factors(config));
  if (config.rope.longrope) {
    add_factors(kLongFactors, at::tensor(config.rope.longrope->long_factor, at::kFloat));
    add_factors(kShortFactors, at::tensor(config.rope.longrope->short_factor, at::kFloat));
  }
  for (const auto& [name, tensor] : stored.catalog().tensors) {
    if (name.ends_with("rotary_emb.inv_freq") || (config.tie_word_embeddings && name == "lm_head.weight")) continue;
    const auto known = checkpoint::gguf_name(architecture, name);
    if (!known) throw ConfigError("{}: '{}' has no place in a GGUF file of {}", folder, name, config.model_type);
    if (checkpoint::number_of_expert(name)) {
      const auto [stack, is_new] = stacks.try_emplace(*known, names.size());
      if (!is_new) {
        names[stack->second].push_back(name);
        continue;
      }
    }
    tensors.push_back({.name = *known, .sizes = tensor.shape, .code = code_of(*known, tensor.shape, code, config.tie_word_embeddings)});
    names.push_back({name});
  }
  const auto before = tensors.size() - names.size();
  for (const auto& [stack, i] : stacks) {
    if (std::ssize(names[i]) != config.experts->num_experts)
      throw ConfigError("{}: '{}' is there for {} experts of {}", folder, stack, names[i].size(), config.experts->num_experts);
    std::ranges::sort(names[i], {}, [](const std::string& name) { return std::pair(name.size(), name); });  // by number
    auto& sizes = tensors[before + i].sizes;
    sizes.insert(sizes.begin(), config.experts->num_experts);
  }
  checkpoint::GgufWriter writer(file, metadata, tensors);
  for (const auto& values : factors) writer.write(values);
  for (const auto& some : names) {
    if (checkpoint::number_of_expert(some.front())) {
      std::vector<at::Tensor> experts;
      for (const auto& name : some) experts.push_back(stored.read(name));
      writer.write(at::stack(experts));
      continue;
    }
    const auto& name = some.front();
    const auto heads = checkpoint::heads_in_pairs(architecture, name, config.num_attention_heads, config.key_value_heads());
    auto values = stored.read(name);
    if (checkpoint::has_one_added(architecture, name)) values = values.to(at::kFloat) + 1;
    writer.write(heads > 0 ? checkpoint::rows_for_gguf(values, heads) : values);
  }
  writer.close();
}

bool has_description(const fs::path& model) {
  return is_folder(model) ? is_there(model / models::kConfigFile) : is_there(model) && checkpoint::is_gguf_file(model);
}

at::ScalarType dtype_of_weights(const fs::path& model) {
  std::map<at::ScalarType, int64_t> values;
  for (const auto& [name, tensor] : checkpoint::read_model(model).tensors) values[tensor.dtype] += c10::multiply_integers(tensor.shape);
  const auto most = std::ranges::max_element(values, {}, [](const auto& each) { return each.second; });
  return most == values.end() ? at::kFloat : most->first;
}

void write_description(const fs::path& model, const fs::path& folder, std::optional<at::ScalarType> dtype) {
  if (!is_folder(model)) {
    const auto config = config_of(model);
    const auto tokenizer = tokenizer_of(model);
    config.write(folder, dtype ? *dtype : dtype_of_weights(model));
    return tokenizer.write(folder);
  }
  make_folder(folder);
  const auto config = InputFile(model / models::kConfigFile).read_all();
  write_text(folder / models::kConfigFile, dtype ? with_dtype(config, *dtype) : config);
  for (const auto& [name, text] : data::files_beside(model)) write_text(folder / name, text);
}

void write_hub(const fs::path& file, const fs::path& folder) {
  checkpoint::convert(file, folder, {.to = checkpoint::Format::Hub});
  write_description(file, folder);
}

}  // namespace tessera::llm
