#include "tessera/optim/optimizer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <set>

#include "tessera/base/error.h"

namespace tessera::optim {
namespace {

void expect_leaf(const at::Tensor& parameter) {
  if (!parameter.defined() || !parameter.is_leaf()) {
    throw UsageError(
        "an optimizer was given something that is no parameter of its own (undefined, the result of an operation, or a whole "
        "parameter of a sharded model); pass tessera::parameters(model)");
  }
}

at::Tensor& made(std::map<std::string, at::Tensor>& state, const char* name, const at::Tensor& like) {
  auto& tensor = state[name];
  if (!tensor.defined()) tensor = at::zeros(like.sizes(), like.options());
  return tensor;
}

/// The state that Adam keeps, as the lists that its fused kernels take.
struct Moments {
  std::vector<at::Tensor> first, second, unused, steps;

  void add(std::map<std::string, at::Tensor>& state, const at::Tensor& parameter) {
    first.push_back(made(state, "first", parameter));
    second.push_back(made(state, "second", parameter));
    auto& count = state["steps"];
    if (!count.defined()) count = at::zeros({}, parameter.options().dtype(at::kFloat));
    count.add_(1);
    steps.push_back(count);
  }
};

}  // namespace

Optimizer::Optimizer(std::vector<ParameterGroup> groups, double lr, double weight_decay) {
  std::set<c10::TensorImpl*> seen;
  for (auto& group : groups) {
    for (const auto& parameter : group.parameters) {
      expect_leaf(parameter);
      if (!seen.insert(parameter.unsafeGetTensorImpl()).second) {
        throw UsageError("an optimizer was given the same parameter twice; each belongs to one group, once");
      }
    }
    groups_.push_back({.parameters = std::move(group.parameters),
                       .lr = group.lr.value_or(lr),
                       .weight_decay = group.weight_decay.value_or(weight_decay)});
  }
  if (seen.empty()) throw UsageError("an optimizer was given no parameters");
}

void Optimizer::step() {
  const c10::AutoGradMode no_grad(false);
  for (const auto& group : groups_) {
    std::vector<at::Tensor> parameters, gradients;
    for (const auto& parameter : group.parameters) {
      if (!parameter.grad().defined()) continue;
      parameters.push_back(parameter);
      gradients.push_back(parameter.grad());
    }
    if (!parameters.empty()) update(group, parameters, gradients);
  }
}

void Optimizer::zero_grad() {
  for (const auto& group : groups_) {
    for (const auto& parameter : group.parameters) parameter.mutable_grad() = at::Tensor();
  }
}

void Optimizer::set_lr(double lr) {
  const double before = groups_.front().lr;
  for (auto& group : groups_) group.lr = before == 0 ? lr : group.lr * (lr / before);
}

SGD::SGD(std::vector<at::Tensor> parameters, SgdOptions options)
    : SGD(std::vector<ParameterGroup>{{.parameters = std::move(parameters)}}, options) {}

SGD::SGD(std::vector<ParameterGroup> groups, SgdOptions options)
    : Optimizer(std::move(groups), options.lr, options.weight_decay), options_(options) {
  if (options.nesterov && (options.momentum <= 0 || options.dampening != 0)) {
    throw UsageError("SGD: Nesterov's rule needs a momentum and no dampening");
  }
}

void SGD::update(const Group& group, std::vector<at::Tensor>& parameters, std::vector<at::Tensor>& gradients) {
  struct Part {
    std::vector<at::Tensor> parameters, gradients, momenta;
  };
  // The first step of a parameter starts its momentum with the gradient itself, so new and old ones are separate calls.
  Part fresh, known;
  for (size_t i = 0; i < parameters.size(); i++) {
    auto& state = state_of(parameters[i]);
    auto& part = state.contains("momentum") ? known : fresh;
    part.parameters.push_back(parameters[i]);
    part.gradients.push_back(gradients[i]);
    if (options_.momentum != 0) part.momenta.push_back(made(state, "momentum", parameters[i]));
  }
  for (auto* part : {&fresh, &known}) {
    if (part->parameters.empty()) continue;
    at::_fused_sgd_(part->parameters, part->gradients, part->momenta, group.weight_decay, options_.momentum, group.lr, options_.dampening,
                    options_.nesterov, /*maximize=*/false, /*is_first_step=*/part == &fresh);
  }
}

Adam::Adam(std::vector<at::Tensor> parameters, AdamOptions options)
    : Adam(std::vector<ParameterGroup>{{.parameters = std::move(parameters)}}, options) {}

Adam::Adam(std::vector<ParameterGroup> groups, AdamOptions options) : Adam(std::move(groups), options, Decay::ByGradient) {}

Adam::Adam(std::vector<ParameterGroup> groups, AdamOptions options, Decay decay)
    : Optimizer(std::move(groups), options.lr, options.weight_decay), options_(options), decay_(decay) {}

void Adam::update(const Group& group, std::vector<at::Tensor>& parameters, std::vector<at::Tensor>& gradients) {
  Moments moments;
  for (const auto& parameter : parameters) moments.add(state_of(parameter), parameter);
  const auto fused = [&](const auto& kernel) {
    kernel(parameters, gradients, moments.first, moments.second, moments.unused, moments.steps, group.lr, options_.beta1, options_.beta2,
           group.weight_decay, options_.eps, /*amsgrad=*/false, /*maximize=*/false, std::nullopt, std::nullopt);
  };
  if (decay_ == Decay::Direct) {
    fused([](auto&&... arguments) { at::_fused_adamw_(arguments...); });
  } else {
    fused([](auto&&... arguments) { at::_fused_adam_(arguments...); });
  }
}

AdamW::AdamW(std::vector<at::Tensor> parameters, AdamWOptions options)
    : AdamW(std::vector<ParameterGroup>{{.parameters = std::move(parameters)}}, options) {}

AdamW::AdamW(std::vector<ParameterGroup> groups, AdamWOptions options)
    : Adam(std::move(groups),
           {.lr = options.lr, .beta1 = options.beta1, .beta2 = options.beta2, .eps = options.eps, .weight_decay = options.weight_decay},
           Decay::Direct) {}

}  // namespace tessera::optim
