#include "tessera/cli/models/plan_model.h"

#include <ATen/ATen.h>
#include <torch/nn/functional/loss.h>

#include <memory>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/stored/catalogs.h"
#include "tessera/llm/gguf_model.h"
#include "tessera/models/bert.h"
#include "tessera/models/config_file.h"
#include "tessera/models/llama.h"
#include "tessera/optim/adam.h"
#include "tessera/shard/parameters.h"
#include "tessera/train/trainer.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

constexpr int kPlannedSteps = 4;  // one more than a dry run takes

std::unique_ptr<optim::Optimizer> planned_optimizer(const PlannedTraining& training, std::vector<at::Tensor> parameters) {
  if (training.optimizer == "adamw8bit") return std::make_unique<optim::AdamW8bit>(std::move(parameters), optim::AdamWOptions());
  return std::make_unique<optim::AdamW>(std::move(parameters), optim::AdamWOptions());
}

/// `loss_of(model, tokens)` returns the loss of rows of tokens.
template <class Model>
void train_made_up(const auto& config, const PlannedTraining& training, const auto& loss_of) {
  Trainer trainer({.adjust_sharding = [](ShardOptions& options) { options.start = Start::Equal; }});
  auto model = deferred_init([&] { return Model(config); }, {.seed = 1});
  trainer.prepare(model);
  const auto made = planned_optimizer(training, parameters(*model));
  auto& optimizer = *made;
  trainer.prepare(optimizer);
  const bool in_backward = training.step == PlannedTraining::Step::InBackward;
  if (in_backward) optimizer.step_in_backward();
  const auto tokens = at::zeros({training.batch_size, training.length}, at::kLong);
  for (int step = 0; step < kPlannedSteps; step++) {
    trainer.backward(loss_of(model, tokens));
    if (!in_backward) trainer.clip_grad_norm(1);
    trainer.step();
  }
}

PlannedModel planned_llama(const models::LlamaConfig& config) {
  const auto loss_of = [](models::LlamaForCausalLM& model, const at::Tensor& tokens) { return model->loss(tokens, tokens); };
  return {.recipe = "llama",
          .layer_class = "LlamaDecoderLayer",
          .longest = config.max_position_embeddings,
          .train = [=](const PlannedTraining& training) { train_made_up<models::LlamaForCausalLM>(config, training, loss_of); }};
}

PlannedModel planned_bert(const models::BertConfig& config) {
  const auto loss_of = [](models::BertForSequenceClassification& model, const at::Tensor& tokens) {
    return torch::nn::functional::cross_entropy(model->forward(tokens), tokens.select(1, 0));
  };
  return {.recipe = "glue",
          .layer_class = "BertLayer",
          .longest = config.max_position_embeddings,
          .train = [=](const PlannedTraining& training) { train_made_up<models::BertForSequenceClassification>(config, training, loss_of); }};
}

/// The folder whose config.json describes the model.
fs::path folder_of_config(const fs::path& path) {
  if (is_folder(path)) return path;
  const auto folder = path.parent_path().empty() ? fs::path(".") : path.parent_path();
  if (path.filename() == models::kConfigFile) return folder;
  if (path.extension() != ".safetensors")
    throw ConfigError("{} does not describe a model; give a folder with config.json, that file, or one that ends in .safetensors or .gguf", path);
  checkpoint::read_catalog(path);  // throws if the file is damaged
  if (!is_there(folder / models::kConfigFile))
    throw ConfigError("{} has tensors, but does not say of which model; put its config.json beside it", path);
  return folder;
}

}  // namespace

bool names_a_model(const fs::path& path) {
  const auto extension = path.extension();
  return extension == ".json" || extension == ".safetensors" || extension == ".gguf" || is_folder(path);
}

PlannedModel planned_model(const fs::path& path) try {
  if (!is_there(path)) throw ConfigError("{} is not there; a model of the Hugging Face Hub has to be downloaded first, at least its config.json", path);
  if (path.extension() == ".gguf") return planned_llama(llm::read_config(path));
  const auto folder = folder_of_config(path);
  std::string type;
  models::ConfigFile::open(folder).read("model_type", type);
  return type == "bert" ? planned_bert(models::BertConfig::read(folder)) : planned_llama(models::LlamaConfig::read(folder));
} catch (const ConfigError& error) {
  throw ConfigError("{}; any program that trains a model can be planned: tessera plan -n 8 -- PROGRAM ARGS...", error.what());
}

}  // namespace tessera::cli
