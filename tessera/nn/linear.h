// A linear layer in one operator.
#pragma once

#include <ATen/ops/linear.h>
#include <torch/nn/modules/linear.h>

#include <optional>

#include "tessera/shard/call.h"

namespace tessera::nn {

/// The rows of its last dimension: {rows, size}. A reshape to {-1, size} could not tell how many there are if the size is 0.
inline at::Tensor rows_of(const at::Tensor& x) {
  return x.dim() == 1 ? x.unsqueeze(0) : x.flatten(0, -2);
}

/// The same result as `call(layer, x)`. libtorch's Linear::forward takes two operators, one for the product and one for the bias, if x has
/// more than two dimensions.
inline at::Tensor linear(const torch::nn::Linear& layer, const at::Tensor& x) {
  const auto forward = [](const torch::nn::LinearImpl& self, const at::Tensor& in) {
    return at::linear(in, self.weight, self.bias.defined() ? std::optional(self.bias) : std::nullopt);
  };
  return call_with(layer, forward, x);
}

}  // namespace tessera::nn
