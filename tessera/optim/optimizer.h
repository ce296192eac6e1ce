// Optimizers over shards: each step updates all parameters of a group in one call of libtorch's fused kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera::optim {

/// Parameters that share their settings. Unset values are those of the optimizer.
struct ParameterGroup {
  std::vector<at::Tensor> parameters;
  std::optional<double> lr = {};
  std::optional<double> weight_decay = {};
};

/// What all optimizers share: groups, learning rates, gradients.
class Optimizer {
 public:
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;
  virtual ~Optimizer() = default;

  /// Updates every parameter that has a gradient.
  void step();
  void zero_grad();

  /// The rate of the first group; setting one keeps the ratios of the groups to each other.
  double lr() const { return groups_.front().lr; }
  void set_lr(double lr);

 protected:
  struct Group {
    std::vector<at::Tensor> parameters;
    double lr;
    double weight_decay;
  };
  /// One tensor of state for each parameter, made when it is first needed: "momentum", "first", "second", "steps".
  using State = std::map<std::string, at::Tensor>;

  Optimizer(std::vector<ParameterGroup> groups, double lr, double weight_decay);

  /// The parameters of a group that have gradients, with these.
  virtual void update(const Group& group, std::vector<at::Tensor>& parameters, std::vector<at::Tensor>& gradients) = 0;
  State& state_of(const at::Tensor& parameter) { return state_[parameter.unsafeGetTensorImpl()]; }

 private:
  std::vector<Group> groups_;
  std::map<c10::TensorImpl*, State> state_;
};

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
  void update(const Group& group, std::vector<at::Tensor>& parameters, std::vector<at::Tensor>& gradients) override;
  SgdOptions options_;
};

struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
};

/// Weight decay is added to the gradient (L2).
class Adam : public Optimizer {
 public:
  Adam(std::vector<at::Tensor> parameters, AdamOptions options);
  Adam(std::vector<ParameterGroup> groups, AdamOptions options);

 protected:
  /// How weight decay acts: through the gradient, or on the parameters directly.
  enum class Decay { ByGradient, Direct };
  Adam(std::vector<ParameterGroup> groups, AdamOptions options, Decay decay);

 private:
  void update(const Group& group, std::vector<at::Tensor>& parameters, std::vector<at::Tensor>& gradients) override;
  AdamOptions options_;
  Decay decay_;
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

}  // namespace tessera::optim
