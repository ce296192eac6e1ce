// Decides by hand when and how the gradients of a model are reduced over the ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "tessera/base/module_ref.h"
#include "tessera/comm/mesh.h"
#include "tessera/shard/custom_reduction.h"
#include "tessera/shard/options.h"

namespace tessera {

class Unit;

/// While it exists, backward passes of the model reduce nothing: each rank adds up its own gradients of whole parameters, in at least
/// float32. The next backward pass after it adds them to its own before its one reduction. May be nested. Every rank has one at the same
/// time.
class [[nodiscard]] NoSync {
 public:
  NoSync(NoSync&&) = default;
  NoSync& operator=(NoSync&&) = delete;
  ~NoSync();

 private:
  friend NoSync no_sync(ModuleRef model);
  NoSync() = default;

  std::vector<std::shared_ptr<Unit>> units_;
};

/// Throws UsageError if the module is only a part of a sharded model.
NoSync no_sync(ModuleRef model);

enum class Required { No, Yes };

/// Whether backward passes reduce the gradients of the module. Where they are not required to, it is as inside no_sync.
void set_requires_gradient_sync(ModuleRef module, Required required, Recurse recurse = Recurse::Yes);
/// On a mesh with replicas: whether backward passes all-reduce gradients over the replicas. Where they are not required to, each replica
/// adds up its own sharded gradients until a pass does.
void set_requires_all_reduce(ModuleRef module, Required required, Recurse recurse = Recurse::Yes);
/// Reduces gradients that no backward pass has reduced, because the last one before the step was not allowed to. Collective.
void sync_gradients(ModuleRef model);

/// Averages over the ranks what no backward pass does: the gradients of parameters in no unit, such as those in ShardOptions::ignored. Call
/// it between backward and what uses them. Shards in the list, whose gradients are means already, and frozen parameters are left alone; a
/// gradient that only some ranks have counts as zero on the others. Collective, if there are such parameters.
void average_gradients(std::span<const at::Tensor> parameters, const Communicator& world);

/// pre is a power of two, near the square root of the number of ranks; pre * post is that number. A mean over the ranks, as it is computed
/// where no factors are set, has the same bits.
DivideFactors default_divide_factors(int ranks);
void set_gradient_divide_factors(ModuleRef module, DivideFactors factors, Recurse recurse = Recurse::Yes);

/// An empty function returns to the usual reduction.
void set_reduction_hook(ModuleRef module, ReductionHook hook, Recurse recurse = Recurse::Yes);

/// Calls the function in backward whenever the gradient of a shard has been accumulated. `shard.grad()` is then the mean over the ranks; to
/// read it waits for the reduction.
void register_gradient_hook(const at::Tensor& shard, std::function<void(const at::Tensor& shard)> hook);

}  // namespace tessera
