// Gradient descent with momentum, as in torch::optim::SGD.
#pragma once

#include "tessera/optim/optimizer.h"

namespace tessera::optim {

struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
};

class SGD final : public Optimizer {
 public:
  SGD(std::vector<at::Tensor> parameters, SgdOptions options);
  SGD(std::vector<ParameterGroup> groups, SgdOptions options);

 private:
  void apply(const Settings& settings, int64_t step, const Item& item) override;
  SgdOptions options_;
};

}  // namespace tessera::optim
