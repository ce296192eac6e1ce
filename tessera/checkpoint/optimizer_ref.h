// OptimizerRef: refers to an optimizer of Tessera or to one of torch::optim, whose state checkpoints save and load in the same way.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <map>
#include <string>

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}
namespace tessera::optim {
class Optimizer;
using ParameterState = std::map<std::string, at::Tensor>;
}  // namespace tessera::optim

namespace tessera::checkpoint {

/// It is made from a pointer to either, and null if there is no optimizer.
class OptimizerRef {
 public:
  OptimizerRef(std::nullptr_t = nullptr) {}
  OptimizerRef(optim::Optimizer* optimizer) : own_(optimizer) {}
  OptimizerRef(torch::optim::Optimizer* optimizer) : torch_(optimizer) {}

  explicit operator bool() const { return own_ != nullptr || torch_ != nullptr; }

  /// Empty if there is none.
  std::string class_name() const;

  // As those of optim::Optimizer. Of torch::optim they know Adam, AdamW, SGD, Adagrad and RMSprop; any other class is a UsageError.
  std::map<std::string, optim::ParameterState> state(const torch::nn::Module& model) const;
  void expect_state(const torch::nn::Module& model, const std::map<std::string, optim::ParameterState>& state) const;
  void load_state(const torch::nn::Module& model, const std::map<std::string, optim::ParameterState>& state) const;

 private:
  optim::Optimizer* own_ = nullptr;
  torch::optim::Optimizer* torch_ = nullptr;
};

}  // namespace tessera::checkpoint
