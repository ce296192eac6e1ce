// Adam and AdamW, as in torch::optim, and AdamW with 8-bit moments.
#pragma once

#include "tessera/optim/optimizer.h"

namespace tessera::optim {

struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
};

/// Adam whose weight decay is added to the gradient (L2).
class Adam : public Optimizer {
 public:
  Adam(std::vector<at::Tensor> parameters, AdamOptions options);
  Adam(std::vector<ParameterGroup> groups, AdamOptions options);

  std::map<std::string, std::vector<double>> hyperparameters() const override {
    return {{"betas", {options_.beta1, options_.beta2}}, {"eps", {options_.eps}}, {"weight_decay", {options_.weight_decay}}};
  }

 protected:
  /// Whether weight decay is added to the gradient, or shrinks the parameters directly.
  enum class WeightDecay { L2, Decoupled };
  Adam(std::vector<ParameterGroup> groups, AdamOptions options, WeightDecay decay, std::vector<StateKind> in_blocks = {});
  void apply(const Settings& settings, int64_t step, const Item& item) override;
  const AdamOptions& options() const { return options_; }

 private:
  void end_step() final { step_ = at::Tensor(); }
  bool writes_cast_copies() const final { return true; }
  /// Applies the rule with plain operators. It serves devices for which libtorch has no fused kernel, and float64 on CPUs: the fused kernel
  /// there rounds the last values of a tensor differently from its other values, so results would depend on how a parameter is sharded.
  void apply_by_operators(const Settings& settings, int64_t step, const Item& item) const;
  const at::Tensor& number_of_step(int64_t step, at::Device device);

  AdamOptions options_;
  WeightDecay decay_;
  at::Tensor step_;  // the number of the step, as libtorch's fused kernels take it
  int64_t step_value_ = 0;
};

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
};

/// Adam whose weight decay shrinks the parameters directly.
class AdamW final : public Adam {
 public:
  AdamW(std::vector<at::Tensor> parameters, AdamWOptions options);
  AdamW(std::vector<ParameterGroup> groups, AdamWOptions options);
};

/// AdamW with 8-bit moments, as in bitsandbytes: two bytes for each value instead of eight, and two scales for each block of 256 values.
/// Parameters of fewer than 4096 values, and parameters whose shards begin or end inside a block (mostly with Layout::Rows), keep float32
/// moments. The constructor throws UsageError if a parameter is not in host memory.
class AdamW8bit final : public Adam {
 public:
  AdamW8bit(std::vector<at::Tensor> parameters, AdamWOptions options);
  AdamW8bit(std::vector<ParameterGroup> groups, AdamWOptions options);

 private:
  void apply(const Settings& settings, int64_t step, const Item& item) override;
};

}  // namespace tessera::optim
