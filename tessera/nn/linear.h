// A linear layer in one operator.
#pragma once

#include <ATen/ops/linear.h>
#include <torch/nn/modules/linear.h>

namespace tessera::nn {

/// The same result as `layer(x)`. libtorch's Linear::forward takes two operators, one for the product and one for the bias, if x has more
/// than two dimensions.
inline at::Tensor linear(const torch::nn::Linear& layer, const at::Tensor& x) {
  return at::linear(x, layer->weight, layer->bias);
}

}  // namespace tessera::nn
