// LAMB, for very large batches: Adam whose update of each parameter is scaled to the norm of that parameter, times the rate.
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

/// Takes only dense parameters; step() throws UsageError for parameters with gaps in memory. A step all-reduces two numbers for each
/// sharded parameter: the squared norms of the full parameter and of its update.
class Lamb final : public Optimizer {
 public:
  Lamb(std::vector<at::Tensor> parameters, LambOptions options);
  Lamb(std::vector<ParameterGroup> groups, LambOptions options);

 private:
  /// This rank's part of a float32 parameter in host memory, between the two passes of a step.
  struct Pending {
    LambRule rule;
    double lr;
    UpdateRange range;
    Squares squares;
    std::optional<size_t> group;  // index in groups_; unset for parameters that are not sharded
  };
  /// This rank's part of any other parameter, which libtorch's operators update.
  struct PendingTensors {
    double lr;
    at::Tensor parameter, update;
    at::Tensor squares;  // the sums of squares of the parameter and of the update
    std::optional<size_t> group;
  };
  void apply(const Settings& settings, int64_t step, const Item& item) override;
  bool writes_cast_copies() const override { return true; }
  void apply_by_operators(const Settings& settings, int64_t step, const Item& item, std::optional<size_t> group);
  void begin_step() override;
  void end_step() override;
  void end_step_by_operators();
  bool can_step_in_backward() const override { return false; }

  LambOptions options_;
  std::vector<Pending> pending_;
  std::vector<PendingTensors> pending_tensors_;
  std::vector<Communicator> groups_;  // the shard groups of the parameters
};

}  // namespace tessera::optim
