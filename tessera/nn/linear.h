// A linear layer in one operator.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/linear.h>

#include <optional>

#include "tessera/shard/call.h"

namespace tessera::nn {

/// Whether the two are of bfloat16 and the processor has no instructions for it: libtorch is many times slower then than in float32.
bool multiplies_slowly(const at::Tensor& x, const at::Tensor& weight);

/// x @ weight.T + bias. Where that would be slow in bfloat16, it is computed in float32 and rounded.
at::Tensor product(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias = {});

/// The way in which that is done.
at::Tensor wide_product(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias = {});

/// The same result as `call(layer, x)`. libtorch's Linear::forward takes two operators, one for the product and one for the bias, if x has
/// more than two dimensions.
inline at::Tensor linear(const torch::nn::Linear& layer, const at::Tensor& x) {
  const auto forward = [](const torch::nn::LinearImpl& self, const at::Tensor& in) {
    return product(in, self.weight, self.bias.defined() ? std::optional(self.bias) : std::nullopt);
  };
  return call_with(layer, forward, x);
}

}  // namespace tessera::nn
