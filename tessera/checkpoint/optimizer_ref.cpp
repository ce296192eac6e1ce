#include "tessera/checkpoint/optimizer_ref.h"

#include <c10/util/Type.h>
#include <fmt/format.h>
#include <torch/optim/optimizer.h>

#include <nlohmann/json.hpp>
#include <set>
#include <typeinfo>

#include "tessera/base/error.h"
#include "tessera/checkpoint/live/torch_state.h"
#include "tessera/checkpoint/stored/optimizer_keys.h"
#include "tessera/optim/optimizer.h"
#include "tessera/shard/parameters.h"

namespace tessera::checkpoint {

OptimizerRef::OptimizerRef(optim::Optimizer* optimizer) {
  if (optimizer != nullptr) all_.push_back({.own = optimizer});
}

OptimizerRef::OptimizerRef(torch::optim::Optimizer* optimizer) {
  if (optimizer != nullptr) all_.push_back({.torch = optimizer});
}

OptimizerRef::OptimizerRef(std::initializer_list<OptimizerRef> optimizers) {
  for (const auto& optimizer : optimizers) all_.insert(all_.end(), optimizer.all_.begin(), optimizer.all_.end());
  for (const auto& one : all_) {
    if (one.class_name() == class_name()) continue;
    throw UsageError(
        fmt::format("a checkpoint holds the state of one class of optimizers, but was given a {} and a {}; save them under two prefixes",
                    class_name(), one.class_name()));
  }
}

std::string OptimizerRef::class_name() const {
  return all_.empty() ? "" : all_.front().class_name();
}

OptimizerRef::States OptimizerRef::state(const torch::nn::Module& model) const {
  States result;
  for (const auto& one : all_) {
    for (auto& [name, state] : one.state(model)) {
      if (result.emplace(name, std::move(state)).second) continue;
      throw UsageError(fmt::format("two optimizers have a state of the parameter '{}'; a checkpoint has room for one", name));
    }
  }
  return result;
}

std::string OptimizerRef::settings(const torch::nn::Module& model) const {
  auto result = nlohmann::json::array();
  const auto names = named_parameters(model);
  for (const auto& one : all_) {
    for (auto& [settings, parameters] : one.groups()) {
      std::set<const c10::TensorImpl*> own;
      for (const auto& parameter : parameters) own.insert(parameter.unsafeGetTensorImpl());
      auto& group = result.emplace_back(default_settings(one.class_name()));
      group.update(settings);
      group["params"] = nlohmann::json::array();
      for (const auto& [name, parameter] : names) {
        if (own.contains(parameter.unsafeGetTensorImpl())) group["params"].push_back(name);
      }
    }
  }
  return result.dump();
}

void OptimizerRef::expect_state(const torch::nn::Module& model, const States& state) const {
  const auto parts = divided(model, state);
  for (size_t i = 0; i < all_.size(); i++) all_[i].expect_state(model, parts[i]);
}

void OptimizerRef::load_state(const torch::nn::Module& model, const States& state) const {
  const auto parts = divided(model, state);
  for (size_t i = 0; i < all_.size(); i++) all_[i].load_state(model, parts[i]);
}

std::vector<OptimizerRef::States> OptimizerRef::divided(const torch::nn::Module& model, const States& state) const {
  std::map<const c10::TensorImpl*, size_t> owners;
  for (size_t i = 0; i < all_.size(); i++) {
    for (const auto& parameter : all_[i].parameters()) owners[parameter.unsafeGetTensorImpl()] = i;
  }
  std::map<std::string, size_t> owner_of;
  for (const auto& [name, parameter] : named_parameters(model)) {
    if (const auto owner = owners.find(parameter.unsafeGetTensorImpl()); owner != owners.end()) owner_of[name] = owner->second;
  }
  std::vector<States> parts(all_.size());
  for (const auto& [name, tensors] : state) {
    const auto owner = owner_of.find(name);
    parts[owner == owner_of.end() ? 0 : owner->second][name] = tensors;
  }
  return parts;
}

std::string OptimizerRef::One::class_name() const {
  return c10::demangle(own != nullptr ? typeid(*own).name() : typeid(*torch).name());
}

std::vector<at::Tensor> OptimizerRef::One::parameters() const {
  if (own != nullptr) return own->parameters();
  std::vector<at::Tensor> result;
  for (const auto& group : torch->param_groups()) result.insert(result.end(), group.params().begin(), group.params().end());
  return result;
}

std::vector<PythonGroup> OptimizerRef::One::groups() const {
  std::vector<PythonGroup> result;
  if (own == nullptr) {
    for (const auto& group : torch->param_groups())
      result.push_back({.settings = torch_settings(group.options()), .parameters = group.params()});
    return result;
  }
  for (auto& group : own->groups()) {
    nlohmann::json settings = nlohmann::json::object();
    for (const auto& [name, values] : own->hyperparameters()) {
      if (name == "nesterov") {
        settings[name] = values.front() != 0;
      } else {
        settings[name] = values.size() == 1 ? nlohmann::json(values.front()) : nlohmann::json(values);
      }
    }
    settings["lr"] = group.lr.value();
    settings["weight_decay"] = group.weight_decay.value();
    result.push_back({.settings = std::move(settings), .parameters = std::move(group.parameters)});
  }
  return result;
}

OptimizerRef::States OptimizerRef::One::state(const torch::nn::Module& model) const {
  return own != nullptr ? own->state(model) : torch_state(*torch, model);
}

void OptimizerRef::One::expect_state(const torch::nn::Module& model, const States& state) const {
  own != nullptr ? own->expect_state(model, state) : expect_torch_state(*torch, model, state);
}

void OptimizerRef::One::load_state(const torch::nn::Module& model, const States& state) const {
  own != nullptr ? own->load_state(model, state) : load_torch_state(*torch, model, state);
}

}  // namespace tessera::checkpoint
