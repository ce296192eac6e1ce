// An optimizer that was made before the model was sharded.
#pragma once

namespace torch {
namespace nn {
class Module;
}
namespace optim {
class Optimizer;
}
}  // namespace torch

namespace tessera {

/// Moves the optimizer from the whole parameters to their shards, group by group. Before its first step: state of whole parameters does not
/// fit shards. Throws UsageError if it holds no parameter of the model.
void rebind(torch::optim::Optimizer& optimizer, const torch::nn::Module& module);

}  // namespace tessera
