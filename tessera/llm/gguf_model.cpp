#include "tessera/llm/gguf_model.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

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
using checkpoint::kRopeFactors;
using models::LlamaConfig;

constexpr std::array<std::string_view, 4> kArchitectures = {"llama", "qwen2", "qwen3", "smollm3"};
/// The sizes that every file has, in the order in which files are written.
constexpr std::pair<const char*, int64_t LlamaConfig::*> kSizes[] = {{"context_length", &LlamaConfig::max_position_embeddings},
                                                                     {"embedding_length", &LlamaConfig::hidden_size},
                                                                     {"block_count", &LlamaConfig::num_hidden_layers},
                                                                     {"feed_forward_length", &LlamaConfig::intermediate_size},
                                                                     {"attention.head_count", &LlamaConfig::num_attention_heads}};
// The meanings of the numbers in tokenizer.ggml.token_type.
constexpr int64_t kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6;

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
  LlamaConfig config{.model_type = architecture,
                     .num_key_value_heads = file.integer(key("attention.head_count_kv")),
                     .head_dim = file.integer(key("attention.key_length")),
                     .attention_bias = architecture != "qwen2" && has("model.layers.0.self_attn.q_proj.bias"),
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
  if (const auto type = file.text(key("rope.scaling.type")); type && *type != "none") {
    if (*type != "linear") throw ConfigError("{}: {}: '{}' is not read here", path, key("rope.scaling.type"), *type);
    config.rope.factor = as_meant(file.number(key("rope.scaling.factor")).value_or(1));
  }
  if (architecture == "smollm3") {
    for (int64_t layer = 0; layer < config.num_hidden_layers; layer++) config.no_rope_layers.push_back((layer + 1) % 4 != 0 ? 1 : 0);
  }
  if (const auto factors = checkpoint::read_gguf_tensor(file, kRopeFactors); factors.defined())
    config.rope.llama3 = scaling_of(factors.flatten(), config, path);
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
  if (config.rope.factor != 1 && !config.rope.llama3) {
    add("rope.scaling.type", text("linear"));
    add("rope.scaling.factor", f32(config.rope.factor));
  }
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

// The files of a Hub folder besides the weights.
constexpr const char* kDescription[] = {models::kConfigFile,
                                        "generation_config.json",
                                        "tokenizer.json",
                                        "tokenizer_config.json",
                                        "special_tokens_map.json",
                                        "chat_template.jinja",
                                        "added_tokens.json",
                                        "vocab.json",
                                        "merges.txt",
                                        "vocab.txt",
                                        "tokenizer.model",
                                        "preprocessor_config.json"};

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
    throw ConfigError("{}: general.architecture: '{}' is not one of the architectures of models::Llama...: llama, qwen2, qwen3, smollm3",
                      file.path(), architecture);
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
  if (config.rope.partial_rotary_factor != 1) refuse("partial_rotary_factor has no place there");
  for (int64_t layer = 0; layer < config.num_hidden_layers; layer++) {
    if (config.slides(layer) && *config.sliding_window < config.max_position_embeddings)
      refuse(fmt::format("sliding_window {} has no place there; with max_position_embeddings {} in config.json it would have no effect",
                         *config.sliding_window, *config.sliding_window));
    if (config.rotates(layer) != (config.model_type != "smollm3" || (layer + 1) % 4 != 0))
      refuse(
          "llama.cpp leaves rotary embeddings out of every fourth layer of smollm3 and of no other model, but no_rope_layers says "
          "otherwise");
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
  auto metadata = general(config, "model", name_of_model, code->file_type);
  add_config(metadata, config);
  add_tokenizer(metadata, tokenizer, config);
  std::vector<GgufTensor> tensors;
  std::vector<std::string> names;
  const auto factors = config.rope.llama3 ? rope_factors(config) : at::Tensor();
  if (factors.defined()) tensors.push_back({.name = kRopeFactors, .sizes = factors.sizes().vec(), .code = plain});
  for (const auto& [name, tensor] : stored.catalog().tensors) {
    if (name.ends_with("rotary_emb.inv_freq") || (config.tie_word_embeddings && name == "lm_head.weight")) continue;
    const auto known = checkpoint::gguf_name(name);
    if (!known) throw ConfigError("{}: '{}' has no place in a GGUF file of {}", folder, name, config.model_type);
    tensors.push_back({.name = *known, .sizes = tensor.shape, .code = code_of(*known, tensor.shape, code, config.tie_word_embeddings)});
    names.push_back(name);
  }
  checkpoint::GgufWriter writer(file, metadata, tensors);
  if (factors.defined()) writer.write(factors);
  for (const auto& name : names) {
    const auto heads = checkpoint::heads_in_pairs(architecture_of(config), name, config.num_attention_heads, config.key_value_heads());
    const auto values = stored.read(name);
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
  for (const auto* name : kDescription) {
    if (!is_there(model / name)) continue;
    auto text = InputFile(model / name).read_all();
    if (dtype && name == std::string_view(models::kConfigFile)) text = with_dtype(text, *dtype);
    write_text(folder / name, text);
  }
}

void write_hub(const fs::path& file, const fs::path& folder) {
  checkpoint::convert(file, folder, {.to = checkpoint::Format::Hub});
  write_description(file, folder);
}

}  // namespace tessera::llm
