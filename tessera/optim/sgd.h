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

  std::map<std::string, std::vector<double>> hyperparameters() const override {
    return {{"momentum", {options_.momentum}},
            {"dampening", {options_.dampening}},
            {"weight_decay", {options_.weight_decay}},
            {"nesterov", {options_.nesterov ? 1.0 : 0.0}}};
  }

 private:
  void apply(const Settings& settings, int64_t step, const Item& item) override;
  bool writes_cast_copies() const override { return true; }
  SgdOptions options_;
};

}  // namespace tessera::optim
