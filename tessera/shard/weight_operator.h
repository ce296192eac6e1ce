// What runs in place of the operator by which a layer of libtorch applies its weight: the layer's own forward can't be replaced.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <optional>
#include <span>
#include <string_view>

#include "tessera/base/no_copy.h"

namespace tessera {

/// Asked wherever linear, a convolution, embedding or batch_norm is called with the weight, with the name of the operator and its arguments.
/// What torch::nn::Linear makes of its weight, a product with weight.t(), counts as aten::linear. Without a result the operator runs as it
/// is.
using WeightOperator = std::function<std::optional<at::Tensor>(std::string_view name, std::span<const c10::IValue> arguments)>;

/// From now on, in place of one that was set before. The weight may be sharded now or later, or not at all. With an empty function the
/// operators run as they are again.
void replace_weight_operator(const at::Tensor& weight, WeightOperator instead);

/// As long as it exists, operators of this thread run as they are.
class PlainOperators : NoCopy {
 public:
  PlainOperators();
  ~PlainOperators();

 private:
  const bool before_;
};

}  // namespace tessera
