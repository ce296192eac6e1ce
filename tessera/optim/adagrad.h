// Adagrad, as in torch::optim: the rate of each value falls with the sum of its squared gradients.
#pragma once

#include "tessera/optim/optimizer.h"

namespace tessera::optim {

struct AdagradOptions {
  double lr = 1e-2;
  double lr_decay = 0;
  double eps = 1e-10;
  double weight_decay = 0;  // added to the gradient (L2)
};

class Adagrad final : public Optimizer {
 public:
  Adagrad(std::vector<at::Tensor> parameters, AdagradOptions options);
  Adagrad(std::vector<ParameterGroup> groups, AdagradOptions options);

 private:
  void apply(const Settings& settings, int64_t step, const Item& item) override;
  bool writes_cast_copies() const override { return true; }
  AdagradOptions options_;
};

}  // namespace tessera::optim
