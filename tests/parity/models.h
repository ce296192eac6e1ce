// The models of tests/parity/fsdp2.py, with the same names, weights and batches.
#pragma once

#include <torch/torch.h>

#include <memory>
#include <string>

namespace tessera::parity {

struct Model : torch::nn::Module {
  virtual at::Tensor input(int64_t shift);
  virtual at::Tensor forward(const at::Tensor& x) = 0;
  virtual at::Tensor loss(const at::Tensor& output, int64_t shift);
};

std::shared_ptr<Model> make_model(const std::string& name);

/// The parameters of a model without repetition; tied ones are registered more than once.
std::vector<at::Tensor> distinct_parameters(const torch::nn::Module& model);
/// The parameters of modules, and parameters, by these names.
std::vector<at::Tensor> parameters_of(const torch::nn::Module& model, const std::vector<std::string>& names);
std::shared_ptr<torch::nn::Module> module_of(Model& model, const std::string& name);

}  // namespace tessera::parity
