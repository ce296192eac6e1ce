#include "tessera/optim/sgd.h"

#include <ATen/ATen.h>

#include "tessera/base/error.h"

namespace tessera::optim {

SGD::SGD(std::vector<at::Tensor> parameters, SgdOptions options)
    : SGD(std::vector<ParameterGroup>{{.parameters = std::move(parameters)}}, options) {}

SGD::SGD(std::vector<ParameterGroup> groups, SgdOptions options)
    : Optimizer(std::move(groups), {.lr = options.lr, .weight_decay = options.weight_decay},
                options.momentum != 0 ? std::vector<std::string>{"momentum"} : std::vector<std::string>{}),
      options_(options) {
  if (options.nesterov && (options.momentum <= 0 || options.dampening != 0)) {
    throw UsageError("SGD: Nesterov's rule needs a momentum and no dampening");
  }
}

void SGD::apply(const Settings& settings, int64_t step, Update& update) {
  at::_fused_sgd_(update.parameters, update.gradients, update.state["momentum"], settings.weight_decay, options_.momentum, settings.lr,
                  options_.dampening, options_.nesterov, /*maximize=*/false, /*is_first_step=*/step == 1);
}

}  // namespace tessera::optim
