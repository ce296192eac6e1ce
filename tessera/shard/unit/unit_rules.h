// What can be changed about a unit after it was made.
#pragma once

#include <memory>
#include <vector>

#include "tessera/shard/options.h"

namespace tessera {

class Unit;

struct UnitRules {
  ReshardAfterForward reshard_after_forward = {};
  bool reshard_after_backward = true;
  /// The units that are prefetched when this one is used, in place of those that the learned order predicts.
  std::vector<std::weak_ptr<Unit>> forward_prefetch = {}, backward_prefetch = {};
};

/// What the outermost fully_shard call decides for all units of a model.
struct ScheduleRules {
  explicit ScheduleRules(const ShardOptions& options)
      : max_live_units(options.max_live_units),
        forward_prefetch(options.forward_prefetch),
        backward_prefetch(options.backward_prefetch),
        prefetch_depth(options.prefetch_depth),
        limit_all_gathers(options.limit_all_gathers),
        unused_parameters(options.unused_parameters) {}

  int max_live_units;
  bool forward_prefetch;
  BackwardPrefetch backward_prefetch;
  int prefetch_depth;
  bool limit_all_gathers;
  UnusedParameters unused_parameters;
};

}  // namespace tessera
