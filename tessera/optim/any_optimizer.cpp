#include "tessera/optim/any_optimizer.h"

#include <torch/optim/optimizer.h>

#include "tessera/optim/optimizer.h"

namespace tessera::optim {

std::vector<at::Tensor> parameters_of(const AnyOptimizer& optimizer) {
  if (const auto* const own = std::get_if<Optimizer*>(&optimizer)) return (*own)->parameters();
  std::vector<at::Tensor> result;
  for (const auto& group : std::get<torch::optim::Optimizer*>(optimizer)->param_groups())
    result.insert(result.end(), group.params().begin(), group.params().end());
  return result;
}

}  // namespace tessera::optim
