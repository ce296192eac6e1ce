#include "tessera/optim/sgd.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "tessera/base/error.h"
#include "tessera/optim/update_range.h"

namespace tessera::optim {

SGD::SGD(std::vector<at::Tensor> parameters, SgdOptions options)
    : SGD(std::vector<ParameterGroup>{{.parameters = std::move(parameters)}}, options) {}

SGD::SGD(std::vector<ParameterGroup> groups, SgdOptions options)
    : Optimizer(
          std::move(groups), {.lr = options.lr, .weight_decay = options.weight_decay},
          options.momentum != 0 ? std::vector<StateKind>{{.name = "momentum_buffer"}} : std::vector<StateKind>{},
          fmt::format("SGD with momentum {}, dampening {}{}", options.momentum, options.dampening, options.nesterov ? ", Nesterov's" : "")),
      options_(options) {
  expect_option("momentum", options.momentum);
  if (options.nesterov && (options.momentum <= 0 || options.dampening != 0)) {
    throw UsageError("SGD: nesterov needs a momentum above 0 and a dampening of 0");
  }
}

void SGD::apply(const Settings& settings, int64_t step, const Item& item) {
  if (has_loops(item.parameter, item.gradient, item.state)) {
    const SgdRule rule{.common = {.factor = value_of(item.factor), .l2 = static_cast<float>(settings.weight_decay)},
                       .lr = static_cast<float>(settings.lr),
                       .momentum = static_cast<float>(options_.momentum),
                       .share = step == 1 ? 1 : static_cast<float>(1 - options_.dampening),
                       .nesterov = options_.nesterov};
    return update_in_parallel(rule, update_range(item.parameter, item.gradient, item.state, item.cast_copy));
  }
  // Plain operators instead of the fused kernel, which in libtorch 2.13 does not update most values of half and bfloat16 tensors.
  auto parameter = item.parameter;
  auto gradient = scaled(item.gradient, item.factor);
  if (settings.weight_decay != 0) gradient = gradient.add(parameter, settings.weight_decay);
  if (!item.state.empty()) {
    auto momentum = item.state.front();
    if (step == 1) {
      momentum.copy_(gradient);
    } else {
      momentum.mul_(options_.momentum).add_(gradient, 1 - options_.dampening);
    }
    gradient = options_.nesterov ? gradient.add(momentum, options_.momentum) : momentum;
  }
  parameter.add_(gradient, -settings.lr);
}

}  // namespace tessera::optim
