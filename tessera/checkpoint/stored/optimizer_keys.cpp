#include "tessera/checkpoint/stored/optimizer_keys.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

namespace tessera::checkpoint {
namespace {

using nlohmann::json;

constexpr std::string_view kOwn = "tessera::optim::", kTorch = "torch::optim::";
constexpr auto kSteps = "steps";

struct Rule {
  std::string_view name;
  std::array<std::pair<const char*, const char*>, 3> keys;  // PyTorch's and ours
};
constexpr std::pair<const char*, const char*> kMoments[] = {{"exp_avg", "first"}, {"exp_avg_sq", "second"}, {"step", kSteps}};
constexpr Rule kRules[] = {{"Adam", {kMoments[0], kMoments[1], kMoments[2]}},
                           {"AdamW", {kMoments[0], kMoments[1], kMoments[2]}},
                           {"SGD", {{{"momentum_buffer", "momentum"}, {"", kSteps}, {"", ""}}}},
                           {"Adagrad", {{{"sum", "sum"}, {"step", kSteps}, {"", ""}}}}};

/// The name of the class without its namespace.
std::string_view last_of(std::string_view optimizer) {
  const auto end = optimizer.rfind(':');
  return end == std::string_view::npos ? optimizer : optimizer.substr(end + 1);
}

const Rule* rule_named(std::string_view optimizer) {
  const auto found = std::ranges::find(kRules, last_of(optimizer), &Rule::name);
  return found == std::end(kRules) ? nullptr : found;
}

bool is_own(std::string_view optimizer) {
  return optimizer.starts_with(kOwn);
}

std::string own_key(const Rule& rule, const std::string& key) {
  const auto found = std::ranges::find_if(rule.keys, [&](const auto& pair) { return pair.first == key; });
  return found == rule.keys.end() || key.empty() ? key : found->second;
}

}  // namespace

std::string class_of_settings(const json& settings) {
  const auto has = [&](const char* name) { return settings.contains(name); };
  const auto torch = [](const char* name) { return std::string(kTorch) + name; };
  if (has("decoupled_weight_decay") && settings["decoupled_weight_decay"].is_boolean())
    return torch(settings["decoupled_weight_decay"] ? "AdamW" : "Adam");
  if (has("nesterov") && has("dampening")) return torch("SGD");
  if (has("lr_decay") && has("initial_accumulator_value")) return torch("Adagrad");
  if (has("alpha") && has("centered")) return torch("RMSprop");
  return kSomeOptimizer;  // the settings of Adam and AdamW were the same before PyTorch 2.7
}

json default_settings(const std::string& optimizer) {
  const auto name = last_of(optimizer);
  json result = json::object();
  if (name == "Adam" || name == "AdamW") {
    const bool decoupled = name == "AdamW";
    result = {{"lr", 0.001},         {"betas", {0.9, 0.999}},
              {"eps", 1e-8},         {"amsgrad", false},
              {"capturable", false}, {"weight_decay", decoupled ? 0.01 : 0.0},
              {"fused", nullptr},    {"decoupled_weight_decay", decoupled}};
  } else if (name == "SGD") {
    result = {{"lr", 0.001}, {"momentum", 0.0}, {"dampening", 0.0}, {"weight_decay", 0.0}, {"nesterov", false}, {"fused", nullptr}};
  } else if (name == "Adagrad") {
    result = {{"lr", 0.01},      {"lr_decay", 0.0}, {"eps", 1e-10}, {"weight_decay", 0.0}, {"initial_accumulator_value", 0.0},
              {"fused", nullptr}};
  } else if (name == "RMSprop") {
    result = {{"lr", 0.01},        {"momentum", 0.0},     {"alpha", 0.99},      {"eps", 1e-8},
              {"centered", false}, {"weight_decay", 0.0}, {"capturable", false}};
  } else {
    return result;
  }
  result.update({{"maximize", false}, {"foreach", nullptr}, {"differentiable", false}});
  return result;
}

bool is_same_rule(const std::string& one, const std::string& other) {
  if (one == other || one == kSomeOptimizer || other == kSomeOptimizer) return true;
  return rule_named(one) != nullptr && rule_named(one) == rule_named(other) && is_own(one) != is_own(other);
}

std::string torch_key(const std::string& optimizer, const std::string& key) {
  const auto* const rule = is_own(optimizer) ? rule_named(optimizer) : nullptr;
  if (rule == nullptr) return key;
  const auto found = std::ranges::find_if(rule->keys, [&](const auto& pair) { return pair.second == key; });
  return found == rule->keys.end() ? key : found->first;
}

std::string renamed_key(const std::string& key, const std::string& from, const std::string& to) {
  if (from == to) return key;
  const auto torch = torch_key(from, key);
  const auto* const rule = is_own(to) ? rule_named(to) : nullptr;
  return torch.empty() || rule == nullptr ? torch : own_key(*rule, torch);
}

std::map<std::string, optim::ParameterState> renamed(std::map<std::string, optim::ParameterState> state, const std::string& from,
                                                     const std::string& to) {
  if (from == to) return state;
  const auto* const rule = is_own(to) ? rule_named(to) : nullptr;
  for (auto& [parameter, tensors] : state) {
    optim::ParameterState result;
    for (auto& [key, tensor] : tensors) {
      const auto name = renamed_key(key, from, to);
      if (!name.empty()) result[name] = std::move(tensor);
    }
    // PyTorch's SGD does not count: what matters is that there has been a first step.
    if (rule != nullptr && rule->name == "SGD") result.try_emplace(kSteps, at::ones({}, at::TensorOptions(at::kCPU).dtype(at::kLong)));
    tensors = std::move(result);
  }
  return state;
}

}  // namespace tessera::checkpoint
