// LAMB: Adam whose step for each parameter is as long as the parameter itself, for very large batches.
#pragma once

#include "tessera/optim/optimizer.h"
#include "tessera/optim/update_kernels.h"

namespace tessera::optim {

struct LambOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-6;
  double weight_decay = 1e-2;
};

/// Dense float32 parameters in host memory. A step sends two numbers for each parameter over the ranks: how long the whole parameter is,
/// and how long its update would be.
class Lamb final : public Optimizer {
 public:
  Lamb(std::vector<at::Tensor> parameters, LambOptions options);
  Lamb(std::vector<ParameterGroup> groups, LambOptions options);

 private:
  /// One parameter's part on this rank, half way through a step.
  struct Pending {
    LambRule rule;
    double lr;
    UpdateRange range;
    Squares squares;
    std::optional<size_t> group;  // in groups_; none for whole parameters
  };
  void apply(const Settings& settings, int64_t step, const Item& item) override;
  void begin_step() override { pending_.clear(); }
  void end_step() override;

  LambOptions options_;
  std::vector<Pending> pending_;
  std::vector<Communicator> groups_;  // over which parameters are sharded
};

}  // namespace tessera::optim
