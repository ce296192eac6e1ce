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

/// Made from a pointer to an optimizer of either library, or from several pointers. Null if there is no optimizer.
class OptimizerRef {
 public:
  OptimizerRef(std::nullptr_t = nullptr) {}
  OptimizerRef(optim::Optimizer* optimizer);
  OptimizerRef(torch::optim::Optimizer* optimizer);
  OptimizerRef(optim::AnyOptimizer optimizer) : all_{optimizer} {}
  /// Refers to several optimizers of one class, each of which has some of the model's parameters. Throws UsageError if their classes
  /// differ.
  OptimizerRef(std::initializer_list<OptimizerRef> optimizers);

  explicit operator bool() const { return !all_.empty(); }

  /// Returns the class name of the optimizers, which is the same for all. Empty if there is none.
  std::string class_name() const;

  /// Returns as JSON what Python calls param_groups: the settings of each group as they are now, and the names of its parameters, in their
  /// order in the model.
  std::string settings(const torch::nn::Module& model) const;

  // Do what the functions of the same names in optim::Optimizer do. For torch::optim, they throw UsageError for classes other than Adam,
  // AdamW, SGD, Adagrad and RMSprop.
  std::map<std::string, optim::ParameterState> state(const torch::nn::Module& model) const;
  void expect_state(const torch::nn::Module& model, const std::map<std::string, optim::ParameterState>& state) const;
  void load_state(const torch::nn::Module& model, const std::map<std::string, optim::ParameterState>& state) const;

 private:
  using States = std::map<std::string, optim::ParameterState>;
  /// Divides the state among the optimizers. State of a parameter that no optimizer has goes to the first optimizer, whose expect_state()
  /// then throws and names the parameter.
  std::vector<States> divided(const torch::nn::Module& model, const States& state) const;

  std::vector<optim::AnyOptimizer> all_;
};

}  // namespace tessera::checkpoint
