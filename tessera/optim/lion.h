// Lion: all values move by the same amount, in the direction of the sign of a moving average. It has half the state of Adam.
#pragma once

#include "tessera/optim/optimizer.h"

namespace tessera::optim {

struct LionOptions {
  double lr = 1e-4;
  double beta1 = 0.9;
  double beta2 = 0.99;
  double weight_decay = 0;  // shrinks the parameters directly
};

class Lion final : public Optimizer {
 public:
  Lion(std::vector<at::Tensor> parameters, LionOptions options);
  Lion(std::vector<ParameterGroup> groups, LionOptions options);

 private:
  void apply(const Settings& settings, int64_t step, const Item& item) override;
  bool writes_cast_copies() const override { return true; }
  LionOptions options_;
};

}  // namespace tessera::optim
