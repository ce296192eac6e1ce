// Calls of modules that only some ranks need.
#pragma once

#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}

namespace tessera {

/// For modules of which a rank calls only some, such as experts. Ranks gather a unit and reduce its gradients together, so each rank has to
/// call the modules that any rank calls, if need be with an input without rows. `own`: how many rows this rank has for each child of
/// `modules`, integers. Returns the sums over the ranks; a child that holds gradients of an earlier pass under no_sync counts, too. Returns
/// `own` if other ranks do not matter: if the modules are not sharded, or if they are in memory that all ranks share, and gradients are
/// disabled. Collective.
at::Tensor rows_on_all_ranks(const torch::nn::Module& modules, const at::Tensor& own);

}  // namespace tessera
