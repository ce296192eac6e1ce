#include "tessera/optim/adagrad.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "tessera/optim/update_range.h"

namespace tessera::optim {

Adagrad::Adagrad(std::vector<at::Tensor> parameters, AdagradOptions options)
    : Adagrad(std::vector<ParameterGroup>{{.parameters = std::move(parameters)}}, options) {}

Adagrad::Adagrad(std::vector<ParameterGroup> groups, AdagradOptions options)
    : Optimizer(std::move(groups), {.lr = options.lr, .weight_decay = options.weight_decay}, {{.name = "sum"}},
                fmt::format("Adagrad with lr decay {}, eps {}", options.lr_decay, options.eps)),
      options_(options) {
  expect_option("lr_decay", options.lr_decay);
  expect_option("eps", options.eps);
}

void Adagrad::apply(const Settings& settings, int64_t step, const Item& item) {
  const double lr = settings.lr / (1 + static_cast<double>(step - 1) * options_.lr_decay);
  if (has_loops(item.parameter, item.gradient, item.state)) {
    const AdagradRule rule{.common = {.factor = value_of(item.factor), .l2 = static_cast<float>(settings.weight_decay)},
                           .lr = static_cast<float>(lr),
                           .eps = static_cast<float>(options_.eps)};
    return update_in_parallel(rule, update_range(item.parameter, item.gradient, item.state, item.cast_copy));
  }
  auto parameter = item.parameter;
  const auto gradient = scaled(item.gradient, item.factor).add(parameter, settings.weight_decay);
  auto sum = item.state[0];
  sum.addcmul_(gradient, gradient);
  parameter.addcdiv_(gradient, sum.sqrt().add_(options_.eps), -lr);
}

}  // namespace tessera::optim
