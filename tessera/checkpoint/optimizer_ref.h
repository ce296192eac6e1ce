// OptimizerRef: refers to optimizers of Tessera or of torch::optim, whose state checkpoints save and load in the same way.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <initializer_list>
#include <map>
#include <string>
#include <vector>

#include "tessera/optim/any_optimizer.h"

namespace torch::nn {
class Module;
}
namespace tessera::optim {
using ParameterState = std::map<std::string, at::Tensor>;
}  // namespace tessera::optim

namespace tessera::checkpoint {

struct PythonGroup;

/// It is made from a pointer to either, or from several pointers. It is null if there is no optimizer.
class OptimizerRef {
 public:
  OptimizerRef(std::nullptr_t = nullptr) {}
  OptimizerRef(optim::Optimizer* optimizer);
  OptimizerRef(torch::optim::Optimizer* optimizer);
  OptimizerRef(optim::AnyOptimizer optimizer) : all_{optimizer} {}
  /// Several, of one class, that divide the parameters of a model among them. Throws UsageError for several classes.
  OptimizerRef(std::initializer_list<OptimizerRef> optimizers);

  explicit operator bool() const { return !all_.empty(); }

  /// Of the class of all of them. Empty if there is none.
  std::string class_name() const;

  /// What Python calls param_groups, as JSON: the settings of each group as they are now, and the names of its parameters, in their order
  /// in the model.
  std::string settings(const torch::nn::Module& model) const;

  // As those of optim::Optimizer. Of torch::optim they know Adam, AdamW, SGD, Adagrad and RMSprop; any other class is a UsageError.
  std::map<std::string, optim::ParameterState> state(const torch::nn::Module& model) const;
  void expect_state(const torch::nn::Module& model, const std::map<std::string, optim::ParameterState>& state) const;
  void load_state(const torch::nn::Module& model, const std::map<std::string, optim::ParameterState>& state) const;

 private:
  using States = std::map<std::string, optim::ParameterState>;
  /// The state for each of them; what is for none of them goes to the first, which refuses it by name.
  std::vector<States> divided(const torch::nn::Module& model, const States& state) const;

  std::vector<optim::AnyOptimizer> all_;
};

}  // namespace tessera::checkpoint
