// What runs in place of batch_norm for a module of libtorch, whose own forward can't be replaced.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace tessera {

/// A call of batch_norm that computes the statistics of its batch. Undefined tensors: the module has none.
struct BatchNormCall {
  at::Tensor input, weight, bias, running_mean, running_var;
  double momentum = 0, eps = 0;
};
using BatchNorm = std::function<at::Tensor(const BatchNormCall& call)>;

/// From now on `replacement` runs in place of batch_norm with this weight. Returns false if the weight is not sharded.
bool replace_batch_norm(const at::Tensor& weight, BatchNorm replacement);

}  // namespace tessera
