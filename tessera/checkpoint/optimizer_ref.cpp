#include "tessera/checkpoint/optimizer_ref.h"

#include <c10/util/Type.h>
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
namespace {

using optim::AnyOptimizer;
using States = std::map<std::string, optim::ParameterState>;

std::string class_of(const AnyOptimizer& any) {
  return c10::demangle(std::visit([](auto* optimizer) { return typeid(*optimizer).name(); }, any));
}

std::vector<PythonGroup> groups_of(torch::optim::Optimizer& optimizer) {
  std::vector<PythonGroup> result;
  for (const auto& group : optimizer.param_groups())
    result.push_back({.settings = torch_settings(group.options()), .parameters = group.params()});
  return result;
}

std::vector<PythonGroup> groups_of(optim::Optimizer& optimizer) {
  std::vector<PythonGroup> result;
  for (auto& group : optimizer.groups()) {
    nlohmann::json settings = nlohmann::json::object();
    for (const auto& [name, values] : optimizer.hyperparameters()) {
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

/// Calls `own` with an optimizer of Tessera, or `torch` with an optimizer of torch::optim.
template <class Own, class Torch>
auto on(const AnyOptimizer& any, Own own, Torch torch) {
  struct Either : Own, Torch {
    using Own::operator(), Torch::operator();
  };
  return std::visit(Either{std::move(own), std::move(torch)}, any);
}

}  // namespace

OptimizerRef::OptimizerRef(optim::Optimizer* optimizer) {
  if (optimizer != nullptr) all_.emplace_back(optimizer);
}

OptimizerRef::OptimizerRef(torch::optim::Optimizer* optimizer) {
  if (optimizer != nullptr) all_.emplace_back(optimizer);
}

OptimizerRef::OptimizerRef(std::initializer_list<OptimizerRef> optimizers) {
  for (const auto& optimizer : optimizers) all_.insert(all_.end(), optimizer.all_.begin(), optimizer.all_.end());
  for (const auto& one : all_) {
    if (class_of(one) == class_name()) continue;
    throw UsageError("a checkpoint holds the state of one class of optimizers, but was given a {} and a {}; save them under two prefixes",
                     class_name(), class_of(one));
  }
}

std::string OptimizerRef::class_name() const {
  return all_.empty() ? "" : class_of(all_.front());
}

States OptimizerRef::state(const torch::nn::Module& model) const {
  States result;
  for (const auto& one : all_) {
    for (auto& [name, state] : on(
             one, [&](optim::Optimizer* own) { return own->state(model); },
             [&](torch::optim::Optimizer* torch) { return torch_state(*torch, model); })) {
      if (result.emplace(name, std::move(state)).second) continue;
      throw UsageError(
          "two optimizers have state of the parameter '{}', but a checkpoint can hold one; give the parameter to one optimizer", name);
    }
  }
  return result;
}

std::string OptimizerRef::settings(const torch::nn::Module& model) const {
  auto result = nlohmann::json::array();
  const auto names = named_parameters(model);
  for (const auto& one : all_) {
    for (auto& [settings, parameters] : std::visit([](auto* optimizer) { return groups_of(*optimizer); }, one)) {
      std::set<const c10::TensorImpl*> own;
      for (const auto& parameter : parameters) own.insert(parameter.unsafeGetTensorImpl());
      auto& group = result.emplace_back(default_settings(class_of(one)));
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
  for (size_t i = 0; i < all_.size(); i++) {
    on(
        all_[i], [&](optim::Optimizer* own) { own->expect_state(model, parts[i]); },
        [&](torch::optim::Optimizer* torch) { expect_torch_state(*torch, model, parts[i]); });
  }
}

void OptimizerRef::load_state(const torch::nn::Module& model, const States& state) const {
  const auto parts = divided(model, state);
  for (size_t i = 0; i < all_.size(); i++) {
    on(
        all_[i], [&](optim::Optimizer* own) { own->load_state(model, parts[i]); },
        [&](torch::optim::Optimizer* torch) { load_torch_state(*torch, model, parts[i]); });
  }
}

std::vector<States> OptimizerRef::divided(const torch::nn::Module& model, const States& state) const {
  std::map<const c10::TensorImpl*, size_t> owners;
  for (size_t i = 0; i < all_.size(); i++) {
    for (const auto& parameter : optim::parameters_of(all_[i])) owners[parameter.unsafeGetTensorImpl()] = i;
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

}  // namespace tessera::checkpoint
