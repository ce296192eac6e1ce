// What the outermost fully_shard call decides for all units of a model.
#pragma once

#include "tessera/shard/options.h"

namespace tessera {

struct ScheduleSettings {
  /// `is_model`: whether the units are those of one model, and not of several modules that happen to have the same world. `is_divided`:
  /// whether some of them lie on a part of its ranks.
  ScheduleSettings(const ShardOptions& options, bool is_model, bool is_divided)
      : world(options.mesh.world()),
        is_model(is_model),
        is_divided(is_divided),
        max_live_units(options.max_live_units),
        forward_prefetch(options.forward_prefetch),
        backward_prefetch(options.backward_prefetch),
        prefetch_depth(options.prefetch_depth.value_or(world.traits().traces ? 0 : 1)),
        limit_all_gathers(options.limit_all_gathers),
        unused_parameters(options.unused_parameters),
        tracing(options.tracing) {}

  Communicator world;
  bool is_model, is_divided;
  int max_live_units;
  bool forward_prefetch;
  BackwardPrefetch backward_prefetch;
  int prefetch_depth;
  bool limit_all_gathers;
  UnusedParameters unused_parameters;
  TracingOptions tracing;
};

}  // namespace tessera
