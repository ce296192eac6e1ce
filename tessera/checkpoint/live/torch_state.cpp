#include "tessera/checkpoint/live/torch_state.h"

#include <ATen/ATen.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <array>
#include <set>
#include <typeinfo>

#include "tessera/base/error.h"
#include "tessera/base/paging_key.h"
#include "tessera/shard/parameters.h"

namespace tessera::checkpoint {
namespace {

namespace to = torch::optim;

/// Visits the fields of the state that libtorch keeps for one parameter. `needed` says whether the next step fails without the tensor.
struct FieldVisitor {
  c10::function_ref<void(const char* name, at::Tensor& value, bool needed)> tensor;
  c10::function_ref<void(const char* name, int64_t& value)> number;
};

void visit(to::SGDParamState& state, const to::SGDOptions& options, const FieldVisitor& visitor) {
  visitor.tensor("momentum_buffer", state.momentum_buffer(), options.momentum() != 0);
}

template <class State, class Options>
void visit_adam(State& state, const Options& options, const FieldVisitor& visitor) {
  visitor.number("step", state.step());
  visitor.tensor("exp_avg", state.exp_avg(), true);
  visitor.tensor("exp_avg_sq", state.exp_avg_sq(), true);
  visitor.tensor("max_exp_avg_sq", state.max_exp_avg_sq(), options.amsgrad());
}

void visit(to::AdamParamState& state, const to::AdamOptions& options, const FieldVisitor& visitor) {
  visit_adam(state, options, visitor);
}

void visit(to::AdamWParamState& state, const to::AdamWOptions& options, const FieldVisitor& visitor) {
  visit_adam(state, options, visitor);
}

void visit(to::AdagradParamState& state, const to::AdagradOptions& /*options*/, const FieldVisitor& visitor) {
  visitor.number("step", state.step());
  visitor.tensor("sum", state.sum(), true);
}

void visit(to::RMSpropParamState& state, const to::RMSpropOptions& options, const FieldVisitor& visitor) {
  visitor.number("step", state.step());
  visitor.tensor("square_avg", state.square_avg(), true);
  visitor.tensor("momentum_buffer", state.momentum_buffer(), options.momentum() > 0);
  visitor.tensor("grad_avg", state.grad_avg(), options.centered());
}

struct TorchRule {
  const std::type_info& optimizer;
  std::unique_ptr<to::OptimizerParamState> (*make)();
  void (*fields)(to::OptimizerParamState& state, const to::OptimizerOptions& options, const FieldVisitor& visitor);
  bool from_the_start;  // whether the optimizer has, and needs, state of every parameter before the first step
};

template <class Optimizer, class State, class Options>
TorchRule rule(bool from_the_start = false) {
  return {.optimizer = typeid(Optimizer),
          .make = []() -> std::unique_ptr<to::OptimizerParamState> { return std::make_unique<State>(); },
          .fields = [](to::OptimizerParamState& state, const to::OptimizerOptions& options,
                       const FieldVisitor& visitor) { visit(static_cast<State&>(state), static_cast<const Options&>(options), visitor); },
          .from_the_start = from_the_start};
}

const TorchRule& rule_of(const to::Optimizer& optimizer) {
  static const std::array rules = {
      rule<to::Adam, to::AdamParamState, to::AdamOptions>(), rule<to::AdamW, to::AdamWParamState, to::AdamWOptions>(),
      rule<to::SGD, to::SGDParamState, to::SGDOptions>(), rule<to::Adagrad, to::AdagradParamState, to::AdagradOptions>(true),
      rule<to::RMSprop, to::RMSpropParamState, to::RMSpropOptions>()};
  const auto& type = typeid(optimizer);
  const auto found = std::ranges::find_if(rules, [&](const TorchRule& each) { return each.optimizer == type; });
  if (found != rules.end()) return *found;
  throw UsageError(
      "checkpoints can't hold the state of a {}; they hold that of Adam, AdamW, SGD, Adagrad and RMSprop of torch::optim, and of all "
      "optimizers of tessera::optim. Leave Contents::optimizer out to save weights only",
      c10::demangle(type.name()));
}

struct OwnedParameter {
  std::string name;
  at::Tensor tensor;
  to::OptimizerOptions& options;
};

/// The optimizer's parameters with their names in the model.
std::vector<OwnedParameter> parameters_of(to::Optimizer& optimizer, const torch::nn::Module& model) {
  std::map<c10::TensorImpl*, std::string> names;
  for (const auto& [name, parameter] : named_parameters(model)) names[parameter.unsafeGetTensorImpl()] = name;
  std::vector<OwnedParameter> result;
  for (auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto name = names.find(parameter.unsafeGetTensorImpl());
      if (name == names.end()) {
        throw UsageError(
            "the optimizer has a parameter that the model does not have; make it after fully_shard, and pass the model that it was made "
            "for");
      }
      result.push_back({.name = name->second, .tensor = parameter, .options = group.options()});
    }
  }
  return result;
}

/// Returns a plain tensor of the same memory, without the paging key, which state that the optimizer has made from a shard carries.
at::Tensor plain(const at::Tensor& value) {
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  const auto options = at::TensorOptions(value.scalar_type()).device(value.device());
  return at::empty({0}, options).set_(value.storage(), value.storage_offset(), value.sizes(), value.strides());
}

/// Returns a tensor of state with these values, made from the parameter as the optimizer makes it.
at::Tensor state_like(const at::Tensor& parameter, const at::Tensor& values) {
  auto result = at::zeros_like(parameter);
  if (values.is_meta()) return result;
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  return result.copy_(values);
}

}  // namespace

nlohmann::json torch_settings(const to::OptimizerOptions& options) {
  nlohmann::json settings = {{"lr", options.get_lr()}};
  const auto adam = [&](const auto& own) {
    settings.update({{"betas", {std::get<0>(own.betas()), std::get<1>(own.betas())}},
                     {"eps", own.eps()},
                     {"weight_decay", own.weight_decay()},
                     {"amsgrad", own.amsgrad()}});
  };
  if (const auto* const own = dynamic_cast<const to::AdamWOptions*>(&options)) adam(*own);
  if (const auto* const own = dynamic_cast<const to::AdamOptions*>(&options)) adam(*own);
  if (const auto* const own = dynamic_cast<const to::SGDOptions*>(&options)) {
    settings.update({{"momentum", own->momentum()},
                     {"dampening", own->dampening()},
                     {"weight_decay", own->weight_decay()},
                     {"nesterov", own->nesterov()}});
  }
  if (const auto* const own = dynamic_cast<const to::AdagradOptions*>(&options)) {
    settings.update({{"lr_decay", own->lr_decay()},
                     {"weight_decay", own->weight_decay()},
                     {"initial_accumulator_value", own->initial_accumulator_value()},
                     {"eps", own->eps()}});
  }
  if (const auto* const own = dynamic_cast<const to::RMSpropOptions*>(&options)) {
    settings.update({{"alpha", own->alpha()},
                     {"eps", own->eps()},
                     {"weight_decay", own->weight_decay()},
                     {"momentum", own->momentum()},
                     {"centered", own->centered()}});
  }
  return settings;
}

std::map<std::string, optim::ParameterState> torch_state(to::Optimizer& optimizer, const torch::nn::Module& model) {
  const auto& rule = rule_of(optimizer);
  std::map<std::string, optim::ParameterState> result;
  for (const auto& [name, parameter, options] : parameters_of(optimizer, model)) {
    const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
    if (found == optimizer.state().end()) continue;
    auto& own = result[name];
    const auto tensor = [&](const char* key, at::Tensor& value, bool) {
      if (value.defined()) own[key] = plain(value);
    };
    const auto number = [&](const char* key, int64_t& value) {
      own[key] = at::scalar_tensor(value, at::TensorOptions(at::kCPU).dtype(at::kLong));
    };
    rule.fields(*found->second, options, {.tensor = tensor, .number = number});
  }
  return result;
}

void expect_torch_state(to::Optimizer& optimizer, const torch::nn::Module& model,
                        const std::map<std::string, optim::ParameterState>& state) {
  const auto& rule = rule_of(optimizer);
  std::set<std::string> known;
  for (const auto& [name, parameter, options] : parameters_of(optimizer, model)) {
    known.insert(name);
    const auto saved = state.find(name);
    if (saved == state.end()) {
      if (rule.from_the_start) throw UsageError("the state has nothing for '{}'; it was saved by another optimizer", name);
      continue;
    }
    std::set<std::string> kept;
    const auto refuse_missing = [&](const char* key) {
      throw UsageError("the state of '{}' has no '{}', which this optimizer needs; was it saved with other options?", saved->first, key);
    };
    const auto& sizes = parameter.sizes();
    const auto tensor = [&](const char* key, at::Tensor&, bool needed) {
      if (needed) kept.insert(key);
      const auto value = saved->second.find(key);
      if (value == saved->second.end()) {
        if (needed) refuse_missing(key);
      } else if (value->second.sizes() != sizes) {
        throw UsageError("the state '{}' of '{}' has the sizes [{}], but the parameter's shard here has [{}]", key, saved->first,
                         joined(value->second.sizes()), joined(sizes));
      }
    };
    const auto number = [&](const char* key, int64_t&) {
      kept.insert(key);
      const auto value = saved->second.find(key);
      if (value == saved->second.end()) refuse_missing(key);
      if (value->second.numel() != 1 || value->second.is_meta()) throw UsageError("'{}' of '{}' is not a number", key, saved->first);
    };
    rule.fields(*rule.make(), options, {.tensor = tensor, .number = number});
    for (const auto& [key, value] : saved->second) {
      if (kept.contains(key)) continue;
      throw UsageError("the state of '{}' has a '{}', which this optimizer does not keep; was it saved with other options?", saved->first,
                       key);
    }
  }
  for (const auto& [name, saved] : state) {
    if (!known.contains(name)) throw UsageError("the state is of a parameter '{}', which this optimizer does not have", name);
  }
}

void load_torch_state(to::Optimizer& optimizer, const torch::nn::Module& model, const std::map<std::string, optim::ParameterState>& state) {
  expect_torch_state(optimizer, model, state);
  const auto& rule = rule_of(optimizer);
  for (const auto& [name, parameter, options] : parameters_of(optimizer, model)) {
    optimizer.state().erase(parameter.unsafeGetTensorImpl());
    const auto saved = state.find(name);
    if (saved == state.end()) continue;
    auto own = rule.make();
    const auto& like = parameter;
    const auto tensor = [&](const char* key, at::Tensor& value, bool) {
      if (const auto found = saved->second.find(key); found != saved->second.end()) value = state_like(like, found->second);
    };
    const auto number = [&](const char* key, int64_t& value) { value = saved->second.at(key).item<int64_t>(); };
    rule.fields(*own, options, {.tensor = tensor, .number = number});
    optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(own);
  }
}

}  // namespace tessera::checkpoint
