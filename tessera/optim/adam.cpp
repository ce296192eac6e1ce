#include "tessera/optim/adam.h"

#include <ATen/ATen.h>

namespace tessera::optim {

Adam::Adam(std::vector<at::Tensor> parameters, AdamOptions options)
    : Adam(std::vector<ParameterGroup>{{.parameters = std::move(parameters)}}, options) {}

Adam::Adam(std::vector<ParameterGroup> groups, AdamOptions options) : Adam(std::move(groups), options, Decay::ByGradient) {}

Adam::Adam(std::vector<ParameterGroup> groups, AdamOptions options, Decay decay)
    : Optimizer(std::move(groups), {.lr = options.lr, .weight_decay = options.weight_decay}, {"first", "second"}),
      options_(options),
      decay_(decay) {}

void Adam::apply(const Settings& settings, int64_t step, Update& update) {
  const auto number = at::full({}, step, update.parameters.front().options().dtype(at::kFloat));
  const std::vector<at::Tensor> steps(update.parameters.size(), number);
  const auto fused = [&](const auto& kernel) {
    kernel(update.parameters, update.gradients, update.state["first"], update.state["second"], std::vector<at::Tensor>(), steps,
           settings.lr, options_.beta1, options_.beta2, settings.weight_decay, options_.eps, /*amsgrad=*/false, /*maximize=*/false,
           std::nullopt, std::nullopt);
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
