// ScheduleSettings: settings of the outermost fully_shard call for all units of a model.
#pragma once

#include "tessera/shard/options.h"

namespace tessera {

struct ScheduleSettings : ScheduleOptions {
  /// `is_model`: whether the units are those of one model, and not of several modules that happen to have the same world. `is_divided`:
  /// whether some of them lie on a part of its ranks.
  ScheduleSettings(const ShardOptions& options, bool is_model, bool is_divided)
      : ScheduleOptions(options.schedule), world(options.mesh.world()), is_model(is_model), is_divided(is_divided) {}

  int units_ahead() const { return prefetch_depth.value_or(world.traits().traces ? 0 : 1); }

  Communicator world;
  bool is_model, is_divided;
};

}  // namespace tessera
