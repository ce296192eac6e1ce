// rebind: moves an optimizer that was made before fully_shard over to the shards.
#pragma once

#include "tessera/base/module_ref.h"

namespace torch {
namespace nn {
class Module;
}
namespace optim {
class Optimizer;
}
}  // namespace torch

namespace tessera {

/// Replaces the unsharded parameters in the optimizer's parameter groups by their shards. Throws UsageError if the optimizer has already
/// made a step, because its state has the sizes of full parameters, and if it holds no sharded parameter of the model.
void rebind(torch::optim::Optimizer& optimizer, ConstModuleRef module);

}  // namespace tessera
