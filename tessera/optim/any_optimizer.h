// AnyOptimizer: an optimizer of Tessera or of torch::optim, for functions that take either.
#pragma once

#include <ATen/core/Tensor.h>

#include <variant>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace tessera::optim {

class Optimizer;

using AnyOptimizer = std::variant<Optimizer*, torch::optim::Optimizer*>;

/// Returns the parameters of all groups of the optimizer.
std::vector<at::Tensor> parameters_of(const AnyOptimizer& optimizer);

}  // namespace tessera::optim
