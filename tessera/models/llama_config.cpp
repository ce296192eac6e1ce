#include "tessera/models/llama_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>

#include "tessera/models/config_file.h"
#include "tessera/models/llama_rope.h"

namespace tessera::models {
namespace {

constexpr int64_t kMostLayers = 65'536;
constexpr auto kGelu = "gelu_pytorch_tanh";

/// The defaults of a family for keys that a file lacks. Sizes need no defaults, because all files have them.
struct Family {
  std::string_view model_type, architecture;
  double rope_theta = 10000;
  std::optional<int64_t> sliding_window = {}, head_dim = {};
  bool tied = false;
  int64_t full_each = 0;  // each full_each-th layer sees all tokens
  std::optional<double> attention_cap = {}, final_cap = {}, local_theta = {};
  bool has_experts = false;
};
constexpr std::array kFamilies = {
    Family{"llama", "LlamaForCausalLM"},
    Family{.model_type = "mistral", .architecture = "MistralForCausalLM", .sliding_window = 4096},
    Family{.model_type = "mixtral", .architecture = "MixtralForCausalLM", .rope_theta = 1e6, .has_experts = true},
    Family{"qwen2", "Qwen2ForCausalLM"},
    Family{.model_type = "qwen2_moe", .architecture = "Qwen2MoeForCausalLM", .has_experts = true},
    Family{.model_type = "qwen3", .architecture = "Qwen3ForCausalLM", .head_dim = 128},
    Family{.model_type = "qwen3_moe", .architecture = "Qwen3MoeForCausalLM", .has_experts = true},
    Family{.model_type = "smollm3", .architecture = "SmolLM3ForCausalLM", .rope_theta = 2000000, .tied = true},
    Family{.model_type = "gemma2",
           .architecture = "Gemma2ForCausalLM",
           .sliding_window = 4096,
           .head_dim = 256,
           .tied = true,
           .full_each = 2,
           .attention_cap = 50,
           .final_cap = 30},
    Family{.model_type = "gemma3_text",
           .architecture = "Gemma3ForCausalLM",
           .rope_theta = 1e6,
           .sliding_window = 4096,
           .head_dim = 256,
           .tied = true,
           .full_each = 6,
           .local_theta = 10000},
    Family{"phi3", "Phi3ForCausalLM"},
};

const Family* family_of(std::string_view model_type) {
  const auto found = std::ranges::find(kFamilies, model_type, &Family::model_type);
  return found == kFamilies.end() ? nullptr : &*found;
}

std::string families() {
  std::vector<std::string_view> names;
  for (const auto& family : kFamilies) names.push_back(family.model_type);
  return fmt::format("{}", fmt::join(names, ", "));
}

/// Calls visit(key, member) for all members that are numbers or booleans in the file.
void each_plain(auto& config, const auto& visit) {
  visit("vocab_size", config.vocab_size);
  visit("hidden_size", config.hidden_size);
  visit("intermediate_size", config.intermediate_size);
  visit("num_hidden_layers", config.num_hidden_layers);
  visit("num_attention_heads", config.num_attention_heads);
  visit("max_position_embeddings", config.max_position_embeddings);
  visit("rms_norm_eps", config.rms_norm_eps);
  visit("initializer_range", config.initializer_range);
  visit("attention_dropout", config.attention_dropout);
  visit("attention_bias", config.attention_bias);
  visit("mlp_bias", config.mlp_bias);
  visit("tie_word_embeddings", config.tie_word_embeddings);
}

/// Calls visit(key, member) for what describes the experts of a family.
void each_of_experts(std::string_view model_type, auto& experts, const auto& visit) {
  const bool is_mixtral = model_type == "mixtral";
  visit(is_mixtral ? "num_local_experts" : "num_experts", experts.num_experts);
  visit("num_experts_per_tok", experts.num_experts_per_tok);
  visit("output_router_logits", experts.output_router_logits);
  visit("router_aux_loss_coef", experts.router_aux_loss_coef);
  if (is_mixtral) return;
  visit("moe_intermediate_size", experts.intermediate_size);
  visit("decoder_sparse_step", experts.decoder_sparse_step);
  visit("norm_topk_prob", experts.norm_topk_prob);
  if (model_type == "qwen2_moe") visit("shared_expert_intermediate_size", experts.shared_expert_intermediate_size);
}

void read_experts(const ConfigFile& file, LlamaConfig& config) {
  auto& experts = config.experts.emplace();
  if (config.model_type == "mixtral") {
    experts.intermediate_size = config.intermediate_size;
    file.expect("router_jitter_noise", 0.0, "models::Llama...");
  } else if (config.model_type == "qwen2_moe") {
    experts = {.num_experts = 60, .num_experts_per_tok = 4, .intermediate_size = 1408, .shared_expert_intermediate_size = 5632};
    file.expect("qkv_bias", true, "models::Llama...");
  } else {
    experts = {.num_experts = 128, .num_experts_per_tok = 8, .intermediate_size = 768};
  }
  experts.norm_topk_prob = config.model_type == "mixtral";
  each_of_experts(config.model_type, experts, [&](const char* key, auto& member) { file.read(key, member); });
  file.read("mlp_only_layers", experts.mlp_only_layers);
}

/// Reads which layers of SmolLM3 have no rotary embeddings: those with 0 in no_rope_layers, or every no_rope_layer_interval-th layer.
void read_no_rope(const ConfigFile& file, LlamaConfig& config) {
  file.read("no_rope_layers", config.no_rope_layers);
  if (file.find("no_rope_layers") != nullptr) return;
  int64_t interval = 4;
  file.read("no_rope_layer_interval", interval);
  if (interval < 1) file.refuse("no_rope_layer_interval", "this must be at least 1");
  for (int64_t layer = 0; layer < config.num_hidden_layers; layer++) config.no_rope_layers.push_back((layer + 1) % interval != 0 ? 1 : 0);
}

/// Whether config.json says which layers slide; in other families all do that have a sliding_window.
bool slides_by_layer(std::string_view model_type) {
  const auto* const family = family_of(model_type);
  return model_type != "llama" && model_type != "mistral" && model_type != "phi3" && !family->has_experts;
}

void read_layers(const ConfigFile& file, const Family& family, LlamaConfig& config) {
  if (family.model_type == "smollm3") read_no_rope(file, config);
  const bool by_layer = slides_by_layer(family.model_type), may_say_no = family.model_type.starts_with("qwen");
  bool uses = (!by_layer || family.full_each > 0) && !may_say_no;
  file.read("use_sliding_window", uses);
  config.sliding_window = family.sliding_window;
  file.read("sliding_window", config.sliding_window);
  if (!uses || family.model_type == "llama") config.sliding_window.reset();
  if (config.sliding_window) {
    int64_t full = 0;  // the first `full` layers see all tokens
    if (may_say_no && by_layer) file.read("max_window_layers", full = 28);
    auto full_each = family.full_each;
    if (config.model_type == "gemma3_text") file.read("sliding_window_pattern", full_each);
    const auto sees_all = [&](int64_t layer) {
      return layer < full || (family.model_type == "smollm3" && config.rotates(layer)) || (full_each > 0 && (layer + 1) % full_each == 0);
    };
    for (int64_t layer = 0; layer < config.num_hidden_layers; layer++)
      config.layer_types.emplace_back(sees_all(layer) ? kFull : kSliding);
  }
  if (by_layer) {
    file.read("layer_types", config.layer_types);
    if (!std::ranges::all_of(config.layer_types, [](const std::string& type) { return type == kFull || type == kSliding; }))
      file.refuse("layer_types", fmt::format("this must be a list of {} and {}", kFull, kSliding));
    if (!config.sliding_window && std::ranges::find(config.layer_types, kSliding) != config.layer_types.end())
      file.refuse("layer_types", "sliding_attention needs a sliding_window");
    if (!config.sliding_window) config.layer_types.clear();
  }
}

void read_tokens(const ConfigFile& file, LlamaConfig& config) {
  file.read("bos_token_id", config.bos_token_id);
  file.read("pad_token_id", config.pad_token_id);
  const auto* const eos = file.find("eos_token_id");
  const bool is_one = eos != nullptr && !eos->is_array();
  is_one ? file.read("eos_token_id", config.eos_token_ids.emplace_back()) : file.read("eos_token_id", config.eos_token_ids);
  // Some files have -1 for no token.
  std::erase(config.eos_token_ids, -1);
  for (auto* token : {&config.bos_token_id, &config.pad_token_id}) {
    if (*token == -1) token->reset();
  }
}

}  // namespace

bool LlamaConfig::has_experts(int64_t layer) const {
  if (!experts || (layer + 1) % experts->decoder_sparse_step != 0) return false;
  return std::ranges::find(experts->mlp_only_layers, layer) == experts->mlp_only_layers.end();
}

bool LlamaConfig::slides(int64_t layer) const {
  return sliding_window && !layer_types.empty() && layer_types[static_cast<size_t>(layer)] == kSliding;
}

LlamaConfig LlamaConfig::read(const std::filesystem::path& folder) {
  const auto file = ConfigFile::open(folder);
  LlamaConfig config;
  if (file.find("model_type") == nullptr) file.refuse("model_type", fmt::format("choose one of {}", families()));
  file.read("model_type", config.model_type);
  const auto* family = family_of(config.model_type);
  if (family == nullptr && config.model_type == "gemma3")
    file.refuse("model_type", "pictures are not read here; take the GGUF file of this model, which has only its text model, gemma3_text");
  if (family == nullptr) file.refuse("model_type", fmt::format("models::Llama... knows only {}", families()));
  config.is_gemma() ? file.expect("hidden_activation", kGelu, "models::Llama...") : file.expect("hidden_act", "silu", "models::Llama...");
  file.expect("use_bidirectional_attention", false, "models::Llama...");
  file.expect("resid_pdrop", 0, "models::Llama...");
  if (file.find("quantization_config") != nullptr)
    file.refuse("quantization_config", "quantized weights can't be trained; give the folder of the model before quantization");
  config.tie_word_embeddings = family->tied;
  config.head_dim = family->head_dim;
  config.rope.theta = family->rope_theta;
  config.attn_logit_softcapping = family->attention_cap;
  config.final_logit_softcapping = family->final_cap;
  config.rope_local_base_freq = family->local_theta;
  each_plain(config, [&](const char* key, auto& member) { file.read(key, member); });
  if (config.num_hidden_layers > kMostLayers) file.refuse("num_hidden_layers", fmt::format("this must be at most {}", kMostLayers));
  // Families other than those below have no such biases, even if the file says so.
  const auto is_one_of = [&](auto... types) { return ((family->model_type == types) || ...); };
  if (!is_one_of("llama", "smollm3")) config.mlp_bias = false;
  if (!is_one_of("llama", "qwen3", "qwen3_moe", "smollm3", "gemma2", "gemma3_text")) config.attention_bias = false;
  if (config.is_gemma()) {
    file.read("query_pre_attn_scalar", config.query_pre_attn_scalar.emplace(256));
    file.read("final_logit_softcapping", config.final_logit_softcapping);
  }
  if (config.attn_logit_softcapping) file.read("attn_logit_softcapping", config.attn_logit_softcapping);
  if (config.rope_local_base_freq) file.read("rope_local_base_freq", config.rope_local_base_freq);
  file.read("num_key_value_heads", config.num_key_value_heads);
  file.read("head_dim", config.head_dim);
  file.read("rope_theta", config.rope.theta);
  file.read("partial_rotary_factor", config.rope.partial_rotary_factor);
  read_rope(file, "rope_scaling", config);
  read_rope(file, "rope_parameters", config);
  read_layers(file, *family, config);
  read_tokens(file, config);
  if (family->has_experts) read_experts(file, config);
  file.expect_sensible(config);
  return config;
}

void LlamaConfig::write(const std::filesystem::path& folder, at::ScalarType dtype) const {
  const auto* family = family_of(model_type);
  Json json = {{"architectures", {family->architecture}}, {"model_type", model_type}};
  json[is_gemma() ? "hidden_activation" : "hidden_act"] = is_gemma() ? kGelu : "silu";
  each_plain(*this, [&](const char* key, const auto& member) { json[key] = member; });
  json["num_key_value_heads"] = key_value_heads();
  json["head_dim"] = head_size();
  json["rope_theta"] = rope.theta;
  if (rope.partial_rotary_factor != 1) json["partial_rotary_factor"] = rope.partial_rotary_factor;
  write_rope(rope, json);
  if (model_type != "llama") {
    json["sliding_window"] = sliding_window ? Json(*sliding_window) : Json();
    if (slides_by_layer(model_type) ? !is_gemma() : experts && model_type != "mixtral")
      json["use_sliding_window"] = sliding_window.has_value();
    if (!layer_types.empty() && slides_by_layer(model_type)) json["layer_types"] = layer_types;
  }
  if (experts) {
    each_of_experts(model_type, *experts, [&](const char* key, const auto& member) { json[key] = member; });
    if (model_type != "mixtral") json["mlp_only_layers"] = experts->mlp_only_layers;
  }
  if (!no_rope_layers.empty()) json["no_rope_layers"] = no_rope_layers;
  const auto add = [&](const char* key, const auto& member) { json[key] = member ? Json(*member) : Json(); };
  if (is_gemma()) {
    json["query_pre_attn_scalar"] = query_pre_attn_scalar.value_or(head_size());
    add("attn_logit_softcapping", attn_logit_softcapping);
    add("final_logit_softcapping", final_logit_softcapping);
    if (rope_local_base_freq) add("rope_local_base_freq", rope_local_base_freq);
  }
  json["bos_token_id"] = bos_token_id ? Json(*bos_token_id) : Json();
  json["eos_token_id"] = eos_token_ids.empty() ? Json() : eos_token_ids.size() == 1 ? Json(eos_token_ids[0]) : Json(eos_token_ids);
  json["pad_token_id"] = pad_token_id ? Json(*pad_token_id) : Json();
  json["torch_dtype"] = name_in_config(dtype);
  ConfigFile::write(folder, json);
}

const LlamaConfig& expect_sense(const LlamaConfig& config) {
  const auto expect = [](bool holds, const char* key, const auto& value, const std::string& rule) {
    if (!holds) throw ConfigError("a Llama can't have {} {}: it must be {}", key, value, rule);
  };
  expect(family_of(config.model_type) != nullptr, "model_type", config.model_type, "one of " + families());
  each_plain(config, [&](const char* key, auto value) {
    if constexpr (std::is_same_v<decltype(value), int64_t>) {
      expect(value >= 1, key, value, "at least 1");
      expect(value <= kLargestSize, key, value, fmt::format("at most {}", kLargestSize));
    }
  });
  const auto heads = config.num_attention_heads, shared = config.key_value_heads();
  expect(config.head_dim || config.hidden_size % heads == 0, "hidden_size", config.hidden_size,
         "a multiple of num_attention_heads, unless head_dim is given");
  expect(config.head_size() >= 1 && config.head_size() <= kLargestSize, "head_dim", config.head_size(),
         fmt::format("from 1 to {}", kLargestSize));
  expect(shared >= 1 && heads % shared == 0, "num_key_value_heads", shared, "a divisor of num_attention_heads");
  const auto turned = nn::rotary_size(config.rope, config.head_size());
  expect(turned >= 2 && turned % 2 == 0 && turned <= config.head_size(), "partial_rotary_factor", config.rope.partial_rotary_factor,
         fmt::format("such that an even number of the {} values of a head are rotated", config.head_size()));
  const auto& rope = config.rope;
  const std::pair<const char*, std::optional<double>> above_0[] = {
      {"rope_theta", rope.theta},
      {"factor", rope.llama3 ? rope.llama3->factor : rope.yarn ? rope.yarn->factor : rope.factor},
      {"low_freq_factor", rope.llama3 ? rope.llama3->low_freq_factor : 1},
      {"attention_factor", rope.attention_factor},
      {"rope_local_base_freq", config.rope_local_base_freq},
      {"attn_logit_softcapping", config.attn_logit_softcapping},
      {"final_logit_softcapping", config.final_logit_softcapping},
      {"rms_norm_eps", config.rms_norm_eps}};
  for (const auto& [key, value] : above_0) expect(value.value_or(1) > 0, key, value.value_or(1), "above 0");
  const auto expect_original = [&](int64_t length, int64_t least) {
    expect(length >= least, "original_max_position_embeddings", length, fmt::format("at least {}", least));
  };
  if (const auto& scaling = rope.llama3) {
    expect(scaling->high_freq_factor > scaling->low_freq_factor, "high_freq_factor", scaling->high_freq_factor, "above low_freq_factor");
    expect_original(scaling->original_max_position_embeddings, 1);
  }
  if (const auto& yarn = rope.yarn) {
    expect(yarn->beta_slow > 0 && yarn->beta_fast >= yarn->beta_slow, "beta_fast", yarn->beta_fast, "at least beta_slow, which is above 0");
    expect_original(yarn->original_max_position_embeddings, 1);
  }
  if (const auto& longrope = rope.longrope) {
    for (const auto* factors : {&longrope->short_factor, &longrope->long_factor}) {
      expect(std::ssize(*factors) == turned / 2 && std::ranges::all_of(*factors, [](double factor) { return factor > 0; }),
             "short_factor and long_factor", fmt::format("{}", fmt::join(*factors, ", ")),
             fmt::format("{} numbers above 0, one for each pair of values that is rotated", turned / 2));
    }
    expect_original(longrope->original_max_position_embeddings, 2);
  }
  expect(config.query_pre_attn_scalar.value_or(1) >= 1, "query_pre_attn_scalar", config.query_pre_attn_scalar.value_or(1), "at least 1");
  expect(!config.attn_logit_softcapping || config.attention_dropout == 0, "attention_dropout", config.attention_dropout,
         "0 beside attn_logit_softcapping");
  expect(config.initializer_range >= 0, "initializer_range", config.initializer_range, "at least 0");
  expect(config.attention_dropout >= 0 && config.attention_dropout < 1, "attention_dropout", config.attention_dropout,
         "at least 0 and below 1");
  expect(config.sliding_window.value_or(1) >= 1, "sliding_window", config.sliding_window.value_or(1), "at least 1");
  const auto layers = static_cast<size_t>(config.num_hidden_layers);
  const auto for_all = fmt::format("a list of {} entries, one for each layer", layers);
  expect(config.layer_types.empty() || config.layer_types.size() == layers, "layer_types",
         fmt::format("{}", fmt::join(config.layer_types, ", ")), for_all);
  expect(config.no_rope_layers.empty() || config.no_rope_layers.size() == layers, "no_rope_layers",
         fmt::format("{}", fmt::join(config.no_rope_layers, ", ")), for_all);
  expect(config.experts.has_value() == family_of(config.model_type)->has_experts, "model_type", config.model_type,
         "one with experts if `experts` is set, and else one without");
  if (config.experts) {
    each_of_experts("qwen2_moe", *config.experts, [&](const char* key, auto value) {
      const int64_t least = std::string_view(key).starts_with("shared") ? 0 : 1;
      if constexpr (std::is_same_v<decltype(value), int64_t>)
        expect(value >= least && value <= kLargestSize, key, value, fmt::format("from {} to {}", least, kLargestSize));
    });
    expect(config.experts->num_experts_per_tok <= config.experts->num_experts, "num_experts_per_tok", config.experts->num_experts_per_tok,
           "at most the number of experts");
  }
  auto tokens = config.eos_token_ids;
  for (const auto& token : {config.bos_token_id, config.pad_token_id}) tokens.push_back(token.value_or(0));
  for (const auto token : tokens) expect(token >= 0 && token < config.vocab_size, "a special token", token, "a token of the vocabulary");
  return config;
}

}  // namespace tessera::models
