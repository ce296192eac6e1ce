#include "tessera/optim/lion.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "tessera/optim/update_range.h"

namespace tessera::optim {

Lion::Lion(std::vector<at::Tensor> parameters, LionOptions options)
    : Lion(std::vector<ParameterGroup>{{.parameters = std::move(parameters)}}, options) {}

Lion::Lion(std::vector<ParameterGroup> groups, LionOptions options)
    : Optimizer(std::move(groups), {.lr = options.lr, .weight_decay = options.weight_decay}, {{.name = "exp_avg"}},
                fmt::format("Lion with betas {} and {}", options.beta1, options.beta2)),
      options_(options) {
  expect_option("beta1", options.beta1, 1);
  expect_option("beta2", options.beta2, 1);
}

void Lion::apply(const Settings& settings, int64_t /*step*/, const Item& item) {
  const double keep = 1 - settings.lr * settings.weight_decay;
  if (has_loops(item.parameter, item.gradient, item.state)) {
    const LionRule rule{.common = {.factor = value_of(item.factor), .keep = static_cast<float>(keep)},
                        .lr = static_cast<float>(settings.lr),
                        .update = Decay(options_.beta1),
                        .momentum = Decay(options_.beta2)};
    return update_in_parallel(rule, update_range(item.parameter, item.gradient, item.state, item.cast_copy));
  }
  auto parameter = item.parameter;
  const auto gradient = scaled(item.gradient, item.factor);
  auto momentum = item.state[0];
  parameter.mul_(keep).sub_(momentum.lerp(gradient, 1 - options_.beta1).sign_(), settings.lr);
  momentum.lerp_(gradient, 1 - options_.beta2);
}

}  // namespace tessera::optim
