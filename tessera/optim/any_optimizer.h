// AnyOptimizer: what prepares, saves or scales optimizers takes Tessera's and those of torch::optim alike.
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

/// Of all its groups.
std::vector<at::Tensor> parameters_of(const AnyOptimizer& optimizer);

}  // namespace tessera::optim
