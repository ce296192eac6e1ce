// The model of the recipe for language models: where it comes from, its adapters, units and optimizer.
#pragma once

#include <fmt/format.h>
#include <tessera/models.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <regex>
#include <string>
#include <vector>

#include "llama_flags.h"

namespace {

using namespace tessera;
using Model = models::LlamaForCausalLM;

constexpr double kEmbeddingRate = 1e-6;  // of adapters of embeddings with LoRA+, as in peft

struct Source {
  std::filesystem::path path;  // the path of a model, or of a folder that describes a new model
  models::LlamaConfig config;
  data::Tokenizer tokenizer;
  int64_t length;  // tokens in a row

  explicit Source(const Flags& flags)
      : path(flags.model.empty() ? flags.config : flags.model),
        config(llm::read_config(path)),
        tokenizer(llm::read_tokenizer(path)),
        length(flags.length > 0 ? flags.length : std::min<int64_t>(512, config.max_position_embeddings)) {
    if (flags.length > config.max_position_embeddings)
      throw ConfigError(
          fmt::format("--length {}: the model in {} takes at most {} tokens", flags.length, path.string(), config.max_position_embeddings));
  }
};

using Settings = std::map<std::string, std::string>;

/// Converts flags to settings, which win over the configuration.
Settings settings_of(const Flags& flags) {
  Settings settings;
  if (!flags.method.empty()) settings["tessera_lora_dora"] = flags.method == "dora" ? "true" : "false";
  if (!flags.method.empty() && flags.method != "qlora") settings["tessera_quantisation"] = "no";
  if (flags.method == "full" || !flags.from_adapter.empty()) settings["tessera_lora_r"] = "0";
  const auto set = [&](const char* key, const auto& flag) {
    if (flag) settings[key] = fmt::format("{}", *flag);
  };
  set("tessera_quantisation", flags.quantisation);
  set("tessera_lora_r", flags.rank);
  set("tessera_lora_alpha", flags.alpha);
  set("tessera_lora_dropout", flags.dropout);
  set("tessera_lora_target_modules", flags.target_modules);
  return settings;
}

/// Defaults of --method, for keys that neither flags nor the configuration set.
Settings defaults_of(const Flags& flags) {
  if (flags.method == "qlora") return {{"tessera_quantisation", "nf4"}, {"tessera_lora_r", "8"}};
  if (flags.method == "lora" || flags.method == "dora") return {{"tessera_lora_r", "8"}};
  return {};
}

/// Whether --method or the configuration has made adapters.
bool has_adapters(const Model& model) {
  return !lora::adapters(model).empty();
}

/// Throws ConfigError if flags, configuration and model do not fit together: --adapter without adapters, or adapters that can't be merged.
void expect_use(const Flags& flags, const models::LlamaConfig& config, const Model& model) {
  if (!has_adapters(model)) {
    if (!flags.adapter.empty())
      throw ConfigError(
          "--adapter FOLDER: neither --method nor the configuration makes adapters; give --method lora, or write the model by --output");
    if (flags.lora_plus_ratio) throw ConfigError("--lora-plus-ratio is for adapters; give --method lora");
    for (const auto& module : model->modules()) {
      const auto* const linear = module->as<torch::nn::LinearImpl>();
      if (linear != nullptr && held_form(linear->weight) != nullptr)
        throw ConfigError("tessera_quantisation: quantised weights don't train; set tessera_lora_r, for adapters that train");
    }
    return;
  }
  if (flags.model.empty()) throw ConfigError("adapters need a model that has been trained; give --model PATH");
  if (flags.output.empty()) return;
  if (flags.adapter.empty())
    throw ConfigError("--output merges the adapters into the model; give --adapter FOLDER, too, where the adapters are saved");
  for (const auto& layer : lora::layers_of(model)) {
    if (config.tie_word_embeddings && layer.name.ends_with("embed_tokens"))
      throw ConfigError(fmt::format(
          "--output: '{}' shares its weight with the output layer, in which its adapter does nothing, so the adapter can't be merged; "
          "leave --output out, and use the adapter with the unmerged model",
          layer.name));
  }
}

/// Makes the units that --units names. Sets ShardOptions::start: weights are loaded after sharding, or all ranks draw the same weights.
void prepare_units(const Flags& flags, const Trainer& trainer, Model& model, ShardOptions& options) {
  options.start = flags.model.empty() ? Start::Equal : Start::Loaded;
  const auto units = llm::units_named(flags.units);
  if (trainer.settings().text("distributed_type") != "FSDP") return;
  llm::shard_experts(model, options);
  if (units != llm::Units::Root) llm::shard_ends(model, options, units);
}

/// Returns the options of the adapter from which training begins.
std::optional<lora::Options> given_adapter(const Flags& flags) {
  if (flags.from_adapter.empty()) return std::nullopt;
  const auto options = checkpoint::read_adapter_config(flags.from_adapter);
  checkpoint::expect_on_whole_base({.options = options}, flags.from_adapter);
  const bool is_named = flags.method == "lora" || flags.method == "dora";
  if (is_named && options.use_dora != (flags.method == "dora"))
    throw ConfigError(fmt::format("--method {}: the adapter in {} was trained {} DoRA; leave --method out", flags.method,
                                  flags.from_adapter.string(), options.use_dora ? "with" : "without"));
  return options;
}

/// Makes the model without its weights. prepare() gives it the adapters and the quantised weights of the settings.
Model make_model(const Flags& flags, const Source& source) {
  const auto given = given_adapter(flags);
  return deferred_init(
      [&] {
        Model model(source.config);
        model->model->neftune_alpha = flags.neftune_alpha;
        if (given) lora::apply(model, *given);
        return model;
      },
      {.seed = flags.seed});
}

/// Loads the model. Each rank reads only its own part of the weights.
void load(Model& model, const Flags& flags, Trainer& trainer) {
  checkpoint::load_weights(model, flags.model, {.may_be_missing = {".*\\.lora_.*"}, .may_be_unknown = model->surplus_names()});
  if (!has_adapters(model)) return;
  if (flags.from_adapter.empty()) {
    lora::reset_magnitudes(model);
  } else {
    checkpoint::load_adapter(model, flags.from_adapter);
  }
  if (!flags.run.prefix.empty()) trainer.refer_to_base(flags.model);
}

/// Groups parameters so that norms and biases do not decay, as in Hugging Face's Trainer. With --lora-plus-ratio, the matrices B of adapters,
/// and vectors, learn faster, and adapters of embeddings slowly, as with peft's create_loraplus_optimizer.
std::vector<optim::ParameterGroup> groups_of(const Flags& flags, const Model& model) {
  static const std::regex kept("bias|layernorm|rmsnorm|(^|\\.)norm($|\\.)|_norm($|\\.)"), faster("lora_B|lora_magnitude_vector");
  const auto lr = flags.lr * flags.lora_plus_ratio.value_or(1);
  std::vector<optim::ParameterGroup> groups = {{}, {.parameters = {}, .weight_decay = 0}};
  if (flags.lora_plus_ratio) {
    groups[1].lr = lr;
    groups.push_back({.parameters = {}, .lr = lr});
    groups.push_back({.parameters = {}, .lr = kEmbeddingRate});
  }
  for (const auto& [name, parameter] : named_parameters(*model)) {
    size_t group = std::regex_search(name, kept) ? 1 : 0;
    if (flags.lora_plus_ratio && std::regex_search(name, faster)) group = 2;
    if (flags.lora_plus_ratio && name.find("lora_embedding_") != std::string::npos) group = 3;
    groups[group].parameters.push_back(parameter);
  }
  return groups;
}

std::unique_ptr<optim::Optimizer> make_optimizer(const Flags& flags, const Model& model) {
  const optim::AdamWOptions options{.lr = flags.lr, .beta2 = 0.95, .weight_decay = flags.weight_decay};
  if (flags.optimizer == "adamw8bit") return std::make_unique<optim::AdamW8bit>(groups_of(flags, model), options);
  return std::make_unique<optim::AdamW>(groups_of(flags, model), options);
}

}  // namespace
