// A linear layer in one operator.
#pragma once

#include <ATen/ops/linear.h>
#include <torch/nn/modules/linear.h>

namespace tessera::nn {

/// What `layer(x)` gives. libtorch's Linear::forward multiplies and adds the bias in two passes where x has more than two dimensions.
inline at::Tensor linear(const torch::nn::Linear& layer, const at::Tensor& x) {
  return at::linear(x, layer->weight, layer->bias);
}

}  // namespace tessera::nn
