// Control of when and how the gradients of a model are reduced over the ranks: no_sync, divide factors, hooks.
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
/// float32. The first backward pass after its end adds them to its own gradients and reduces the sums once. May be nested. All ranks must
/// have a NoSync at the same time.
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

/// Sets whether backward passes reduce the gradients of the module. With Required::No they behave as inside no_sync.
void set_requires_gradient_sync(ModuleRef module, Required required, Recurse recurse = Recurse::Yes);
/// On a mesh with replicas: sets whether backward passes all-reduce gradients over the replicas. With Required::No, each replica adds up
/// its own sharded gradients until a pass all-reduces them.
void set_requires_all_reduce(ModuleRef module, Required required, Recurse recurse = Recurse::Yes);
/// Reduces gradients that no backward pass has reduced, because the last backward pass before the step ran without a reduction. Collective.
void sync_gradients(ModuleRef model);

/// Averages over the ranks the gradients that backward passes do not average: those of parameters in no unit, such as
/// ShardOptions::ignored. Call it after backward, before the gradients are used. Shards in the list, whose gradients are means already, and
/// frozen parameters are left alone; a gradient that only some ranks have counts as zero on the others. Collective, if there are such
/// parameters.
void average_gradients(std::span<const at::Tensor> parameters, const Communicator& world);

/// Returns the factors of a mean over the ranks: `pre` is a power of two, near the square root of the number of ranks; pre * post is the
/// number of ranks. Reductions without factors compute the mean with the same bits.
DivideFactors default_divide_factors(int ranks);
void set_gradient_divide_factors(ModuleRef module, DivideFactors factors, Recurse recurse = Recurse::Yes);

/// Replaces the reduction of gradients by the hook; an empty hook restores the usual reduction.
void set_reduction_hook(ModuleRef module, ReductionHook hook, Recurse recurse = Recurse::Yes);

/// Calls the function in backward whenever the gradient of a shard has been accumulated. `shard.grad()` is then the mean over the ranks;
/// reading it waits for the reduction.
void register_gradient_hook(const at::Tensor& shard, std::function<void(const at::Tensor& shard)> hook);

}  // namespace tessera
