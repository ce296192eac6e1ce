// What can be changed about a unit after it was made.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "tessera/shard/options.h"
#include "tessera/shard/reduction.h"

namespace tessera {

class Unit;

struct UnitRules {
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

/// What the outermost fully_shard call decides for all units of a model.
struct ScheduleRules {
  /// `is_model`: whether the units are those of one model, and not of several modules that happen to have the same world. `is_divided`:
  /// whether some of them lie on a part of its ranks.
  ScheduleRules(const ShardOptions& options, bool is_model, bool is_divided)
      : world(options.mesh.world()),
        is_model(is_model),
        is_divided(is_divided),
        max_live_units(options.max_live_units),
        forward_prefetch(options.forward_prefetch),
        backward_prefetch(options.backward_prefetch),
        prefetch_depth(options.prefetch_depth),
        limit_all_gathers(options.limit_all_gathers),
        unused_parameters(options.unused_parameters) {}

  Communicator world;
  bool is_model, is_divided;
  int max_live_units;
  bool forward_prefetch;
  BackwardPrefetch backward_prefetch;
  int prefetch_depth;
  bool limit_all_gathers;
  UnusedParameters unused_parameters;
};

}  // namespace tessera
