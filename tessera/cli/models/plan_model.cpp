#include "tessera/cli/models/plan_model.h"

#include <ATen/ATen.h>
#include <torch/nn/functional/loss.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/stored/catalogs.h"
#include "tessera/llm/gguf_model.h"
#include "tessera/llm/units.h"
#include "tessera/models/bert.h"
#include "tessera/models/config_file.h"
#include "tessera/models/llama.h"
#include "tessera/optim/adam.h"
#include "tessera/shard/parameters.h"
#include "tessera/train/trainer.h"

namespace tessera::cli {
namespace {

constexpr int kPlannedSteps = 4;  // one more than a dry run takes

/// `loss_of(model, tokens)` returns the loss of rows of tokens.
template <class Model>
PlannedModel planned(const std::string& recipe, const std::string& layer_class, const auto& config, const auto& loss_of) {
  const auto train = [=](int64_t rows, int64_t length) {
    Model model = nullptr;
    Trainer trainer({.adjust_sharding = [&](ShardOptions& options) {
      options.start = Start::Equal;
      if constexpr (std::is_same_v<Model, models::LlamaForCausalLM>) {
        if (trainer.settings().text("distributed_type") == "FSDP") llm::shard_experts(model, options);
      }
    }});
    model = deferred_init([&] { return Model(config); }, {.seed = 1});
    trainer.prepare(model);
    optim::AdamW optimizer(parameters(*model), {});
    trainer.prepare(optimizer);
    const auto tokens = at::zeros({rows, length}, at::kLong);
    for (int step = 0; step < kPlannedSteps; step++) {
      trainer.backward(loss_of(model, tokens));
      trainer.clip_grad_norm(1);
      trainer.step();
    }
  };
  return {.recipe = recipe, .layer_class = layer_class, .longest = config.max_position_embeddings, .train = train};
}

PlannedModel planned_llama(const models::LlamaConfig& config) {
  const auto loss_of = [](models::LlamaForCausalLM& model, const at::Tensor& tokens) { return model->loss(tokens, tokens); };
  return planned<models::LlamaForCausalLM>("llama", "LlamaDecoderLayer", config, loss_of);
}

PlannedModel planned_bert(const models::BertConfig& config) {
  const auto loss_of = [](models::BertForSequenceClassification& model, const at::Tensor& tokens) {
    return torch::nn::functional::cross_entropy(model->forward(tokens), tokens.select(1, 0));
  };
  return planned<models::BertForSequenceClassification>("glue", "BertLayer", config, loss_of);
}

}  // namespace

bool names_a_model(const std::filesystem::path& path) {
  const auto extension = path.extension();
  return extension == ".json" || extension == ".safetensors" || extension == ".gguf" || is_folder(path);
}

PlannedModel planned_model(const std::filesystem::path& path) try {
  if (!is_there(path))
    throw ConfigError("{} is not there; a model of the Hugging Face Hub has to be downloaded first, at least its config.json", path);
  if (path.extension() == ".json" && path.filename() != models::kConfigFile) throw ConfigError("{} is not a config.json", path);
  if (path.extension() == ".gguf") {
    auto model = planned_llama(llm::read_config(path));
    model.place = path;
    return model;
  }
  if (path.extension() == ".safetensors") checkpoint::read_catalog(path);  // throws if the file is damaged
  const auto folder = is_folder(path) ? path : std::filesystem::absolute(path).parent_path();
  std::string type;
  const auto file = models::ConfigFile::open(folder);
  file.read("model_type", type);
  auto model = type == "bert" ? planned_bert(models::BertConfig::read(folder)) : planned_llama(models::LlamaConfig::read(folder));
  for (const auto* size : {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}) {
    if (file.find(size) == nullptr) file.refuse(size, "a plan needs it");
  }
  const auto is_of_weights = [](const auto& name) { return name.ends_with(".safetensors") || name.starts_with("pytorch_model"); };
  model.place = folder;
  model.has_weights = std::ranges::any_of(names_in(folder).value(), is_of_weights);
  if (model.has_weights) checkpoint::read_model(folder);  // throws if a file is damaged or a part is missing
  return model;
} catch (const ConfigError& error) {
  throw ConfigError("{}; any program that trains a model can be planned: tessera plan -n 8 -- PROGRAM ARGS...", error.what());
}

}  // namespace tessera::cli
