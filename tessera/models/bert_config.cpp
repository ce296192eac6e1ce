#include "tessera/models/bert_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>

#include "tessera/models/config_file.h"

namespace tessera::models {
namespace {

// transformers has several names for the same function.
const std::map<std::string, BertActivation> kActivations = {
    {"gelu", BertActivation::Gelu},          {"gelu_python", BertActivation::Gelu},
    {"gelu_new", BertActivation::GeluTanh},  {"gelu_pytorch_tanh", BertActivation::GeluTanh},
    {"gelu_fast", BertActivation::GeluTanh}, {"gelu_python_tanh", BertActivation::GeluTanh},
    {"relu", BertActivation::Relu},          {"silu", BertActivation::Silu},
    {"swish", BertActivation::Silu},
};

/// Calls visit(key, member) for all members that are numbers in the file.
void each_number(auto& config, const auto& visit) {
  visit("vocab_size", config.vocab_size);
  visit("hidden_size", config.hidden_size);
  visit("num_hidden_layers", config.num_hidden_layers);
  visit("num_attention_heads", config.num_attention_heads);
  visit("intermediate_size", config.intermediate_size);
  visit("max_position_embeddings", config.max_position_embeddings);
  visit("type_vocab_size", config.type_vocab_size);
  visit("hidden_dropout_prob", config.hidden_dropout_prob);
  visit("attention_probs_dropout_prob", config.attention_probs_dropout_prob);
  visit("layer_norm_eps", config.layer_norm_eps);
  visit("initializer_range", config.initializer_range);
}

}  // namespace

BertConfig BertConfig::read(const std::filesystem::path& folder) {
  const auto file = ConfigFile::open(folder);
  constexpr auto kModels = "models::Bert...";
  file.expect("model_type", "bert", kModels);
  file.expect("position_embedding_type", "absolute", kModels);
  file.expect("is_decoder", false, kModels);
  file.expect("add_cross_attention", false, kModels);
  BertConfig config;
  each_number(config, [&](const char* key, auto& member) { file.read(key, member); });
  file.read("classifier_dropout", config.classifier_dropout);
  file.read("pad_token_id", config.pad_token_id);
  if (const auto act = file.json.find("hidden_act"); act != file.json.end()) {
    const auto known = act->is_string() ? kActivations.find(act->get<std::string>()) : kActivations.end();
    std::vector<std::string> names;
    for (const auto& [name, activation] : kActivations) names.push_back(name);
    if (known == kActivations.end()) file.refuse("hidden_act", fmt::format("choose one of {}", fmt::join(names, ", ")));
    config.hidden_act = known->second;
  }
  // transformers writes the names of the labels, and not their number.
  file.read("num_labels", config.num_labels);
  if (const auto labels = file.json.find("id2label"); labels != file.json.end() && labels->is_object())
    config.num_labels = static_cast<int64_t>(labels->size());
  file.expect_sensible(config);
  return config;
}

void BertConfig::write(const std::filesystem::path& folder) const {
  constexpr const char* kNames[] = {"gelu", "gelu_pytorch_tanh", "relu", "silu"};
  Json json = {{"architectures", {"BertForSequenceClassification"}}, {"model_type", "bert"}};
  each_number(*this, [&](const char* key, const auto& member) { json[key] = member; });
  json["hidden_act"] = kNames[static_cast<size_t>(hidden_act)];
  json["classifier_dropout"] = classifier_dropout ? Json(*classifier_dropout) : Json();
  json["pad_token_id"] = pad_token_id ? Json(*pad_token_id) : Json();
  for (int64_t label = 0; label < num_labels; label++) json["id2label"][std::to_string(label)] = fmt::format("LABEL_{}", label);
  for (int64_t label = 0; label < num_labels; label++) json["label2id"][fmt::format("LABEL_{}", label)] = label;
  ConfigFile::write(folder, json);
}

const BertConfig& expect_sense(const BertConfig& config) {
  const auto expect = [](bool holds, const char* key, auto value, const char* rule) {
    if (!holds) throw ConfigError("a BERT can't have {} {}: it must be {}", key, value, rule);
  };
  each_number(config, [&](const std::string_view key, auto value) {
    if (std::is_integral_v<decltype(value)>) {
      expect(value >= 1, key.data(), value, "at least 1");
      expect(value <= kLargestSize, key.data(), value, "at most 2^28");
    }
    if (key.ends_with("_prob")) expect(value >= 0 && value < 1, key.data(), value, "at least 0 and below 1");
  });
  expect(config.hidden_size % config.num_attention_heads == 0, "hidden_size", config.hidden_size, "a multiple of num_attention_heads");
  expect(config.layer_norm_eps > 0, "layer_norm_eps", config.layer_norm_eps, "above 0");
  expect(config.initializer_range >= 0, "initializer_range", config.initializer_range, "at least 0");
  expect(config.num_labels >= 1, "num_labels", config.num_labels, "at least 1");
  const double classifier = config.classifier_dropout.value_or(0);
  expect(classifier >= 0 && classifier < 1, "classifier_dropout", classifier, "at least 0 and below 1");
  const auto pad = config.pad_token_id.value_or(0);
  expect(pad >= 0 && pad < config.vocab_size, "pad_token_id", pad, "a token of the vocabulary");
  return config;
}

}  // namespace tessera::models
