// Control of when the units of a model are unsharded and resharded: unshard, reshard, rules, prefetch lists.
#pragma once

#include <memory>
#include <span>

#include "tessera/base/module_ref.h"
#include "tessera/shard/options.h"

namespace torch::nn {
class Module;
}

namespace tessera {

class Unit;

/// A unit that is being unsharded.
class UnshardHandle {
 public:
  /// Waits until the unit is unsharded. May be left out: the first operator that needs the unit waits as well.
  void wait() const;

 private:
  friend UnshardHandle unshard(ModuleRef module);
  explicit UnshardHandle(std::shared_ptr<Unit> unit) : unit_(std::move(unit)) {}

  std::shared_ptr<Unit> unit_;
};

/// Starts to unshard the unit of the module before an operator needs it. The unit stays unsharded at least until it has been used once, or
/// until reshard(). Collective, unless the ranks share the unit's memory.
UnshardHandle unshard(ModuleRef module);
/// Reshards the unit of the module at once.
void reshard(ModuleRef module);
/// Reshards all units of the model that this module belongs to, between two passes. Leaves out units that are in use or have to stay
/// unsharded. Does nothing for a module that is not sharded.
void reshard_all(ModuleRef module);

/// Replaces ShardOptions::reshard_after_forward. Collective if the rule is a number of ranks.
void set_reshard_after_forward(ModuleRef module, ReshardAfterForward rule, Recurse recurse = Recurse::Yes);
enum class ReshardAfterBackward { No, Yes };

/// With No, units stay unsharded after their gradients have been reduced, until their shards change. Of several passes between two steps,
/// each pass after the first then saves an all-gather.
void set_reshard_after_backward(ModuleRef module, ReshardAfterBackward rule, Recurse recurse = Recurse::Yes);

/// Prefetches the units of `modules` whenever the unit of `module` is used in forward, in place of the units that the order of earlier
/// passes predicts. An empty list restores that order.
void set_modules_to_forward_prefetch(ModuleRef module, std::span<const std::shared_ptr<torch::nn::Module>> modules);
/// The same for backward.
void set_modules_to_backward_prefetch(ModuleRef module, std::span<const std::shared_ptr<torch::nn::Module>> modules);

}  // namespace tessera
