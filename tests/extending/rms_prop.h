// An optimizer of one's own: RMSProp, as torch::optim::RMSprop has it.
#pragma once

#include <tessera/extending.h>

#include <string>

namespace own {

struct RmsPropOptions {
  double lr = 1e-2;
  double alpha = 0.99;  // how much of the mean of squares a step keeps
  double eps = 1e-8;
  double weight_decay = 0;  // is added to the gradient
};

class RmsProp final : public tessera::optim::Optimizer {
 public:
  RmsProp(std::vector<at::Tensor> parameters, const RmsPropOptions& options)
      : Optimizer({{.parameters = std::move(parameters)}}, {.lr = options.lr, .weight_decay = options.weight_decay},
                  {{.name = "square_avg"}}, "RmsProp with alpha " + std::to_string(options.alpha)),
        options_(options) {
    expect_option("alpha", options.alpha, 1);
  }

 private:
  void apply(const Settings& settings, int64_t /*step*/, const Item& item) override {
    auto parameter = item.parameter, squares = item.state[0];
    const auto gradient = tessera::optim::scaled(item.gradient, item.factor).add(parameter, settings.weight_decay);
    squares.mul_(options_.alpha).addcmul_(gradient, gradient, 1 - options_.alpha);
    parameter.addcdiv_(gradient, squares.sqrt().add_(options_.eps), -settings.lr);
  }

  RmsPropOptions options_;
};

}  // namespace own
