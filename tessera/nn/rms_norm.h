// RMSNorm: values divided by their root mean square, times a weight.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

namespace tessera::nn {

/// Normalizes over the last dimension. Computes in float32 (float64 if x is float64) and rounds to the dtype of x once.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

struct RmsNormImpl : torch::nn::Module {
  /// The weight is stored less `offset`: Gemma's, as the distance from 1.
  explicit RmsNormImpl(int64_t size, double eps = 1e-6, double offset = 0);
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& stream) const override;

  double eps, offset;
  at::Tensor weight;
};
TORCH_MODULE(RmsNorm);

}  // namespace tessera::nn
