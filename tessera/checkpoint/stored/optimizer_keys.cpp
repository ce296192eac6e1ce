#include "tessera/checkpoint/stored/optimizer_keys.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

namespace tessera::checkpoint {
namespace {

using nlohmann::json;

constexpr std::string_view kOwnOptim = "tessera::optim::", kTorchOptim = "torch::optim::";
constexpr std::string_view kStepKey = "step";

constexpr std::string_view kSharedRules[] = {"Adam", "AdamW", "SGD", "Adagrad"};  // classes of Tessera and of torch::optim

/// The name of the class without its namespace.
std::string_view last_of(std::string_view optimizer) {
  const auto end = optimizer.rfind(':');
  return end == std::string_view::npos ? optimizer : optimizer.substr(end + 1);
}

bool is_own(std::string_view optimizer) {
  return optimizer.starts_with(kOwnOptim);
}

bool is_own_sgd(std::string_view optimizer) {
  return is_own(optimizer) && last_of(optimizer) == "SGD";
}

}  // namespace

std::string class_of_settings(const json& settings) {
  const auto has = [&](const char* name) { return settings.contains(name); };
  const auto torch = [](const char* name) { return std::string(kTorchOptim) + name; };
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
  return last_of(one) == last_of(other) && is_own(one) != is_own(other) &&
         std::ranges::find(kSharedRules, last_of(one)) != std::end(kSharedRules);
}

std::string torch_key(const std::string& optimizer, const std::string& key) {
  return is_own_sgd(optimizer) && key == kStepKey ? "" : key;
}

std::string renamed_key(const std::string& key, const std::string& from, const std::string& to) {
  return is_own(to) ? key : torch_key(from, key);
}

std::map<std::string, optim::ParameterState> renamed(std::map<std::string, optim::ParameterState> state, const std::string& from,
                                                     const std::string& to) {
  for (auto& [parameter, tensors] : state) {
    optim::ParameterState result;
    for (auto& [key, tensor] : tensors) {
      const auto name = renamed_key(key, from, to);
      if (!name.empty()) result[name] = std::move(tensor);
    }
    // PyTorch's SGD counts no steps. Tessera's only needs to know that a first step was made, so the count is 1.
    if (is_own_sgd(to)) result.try_emplace(std::string(kStepKey), at::ones({}, at::TensorOptions(at::kCPU).dtype(at::kLong)));
    tensors = std::move(result);
  }
  return state;
}

}  // namespace tessera::checkpoint
