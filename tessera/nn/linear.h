// A linear layer in one operator.
#pragma once

#include <ATen/ops/linear.h>
#include <torch/nn/modules/linear.h>

#include <optional>

#include "tessera/shard/call.h"

namespace tessera::nn {

/// Flattens all dimensions but the last one: {rows, size}. A reshape to {-1, size} would fail if the size is 0.
inline at::Tensor rows_of(const at::Tensor& x) {
  return x.dim() == 1 ? x.unsqueeze(0) : x.flatten(0, -2);
}

/// Returns the same as `call(layer, x)` by one operator. If x has more than two dimensions, libtorch's Linear::forward runs two operators,
/// one for the product and one for the bias.
inline at::Tensor linear(const torch::nn::Linear& layer, const at::Tensor& x) {
  const auto forward = [](const torch::nn::LinearImpl& self, const at::Tensor& in) {
    return at::linear(in, self.weight, self.bias.defined() ? std::optional(self.bias) : std::nullopt);
  };
  return call_with(layer, forward, x);
}

}  // namespace tessera::nn
