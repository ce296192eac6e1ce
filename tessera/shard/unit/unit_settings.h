// UnitSettings: what can be changed about a unit after it was made.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "tessera/shard/custom_reduction.h"
#include "tessera/shard/options.h"

namespace tessera {

class Unit;

struct UnitSettings {
  ReshardAfterForward reshard_after_forward = {};
  bool reshard_after_backward = true;
  bool gradient_sync = true;  // whether backward reduces gradients
  int no_sync = 0;            // how many guards of no_sync exist
  bool all_reduce = true;     // whether backward takes the mean over replicas
  std::optional<DivideFactors> divide = {};
  ReductionHook reduction_hook = {};
  bool syncs() const { return gradient_sync && no_sync == 0; }
  /// The units that are prefetched when this one is used, in place of those that the learned order predicts.
  std::vector<std::weak_ptr<Unit>> forward_prefetch = {}, backward_prefetch = {};
};

}  // namespace tessera
