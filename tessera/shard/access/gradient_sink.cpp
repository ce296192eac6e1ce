#include "tessera/shard/access/gradient_sink.h"

#include "tessera/base/error.h"
#include "tessera/shard/schedule/locked_state.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {

void set_gradient_sink(Unit& unit, const std::shared_ptr<GradientSink>& sink) {
  const LockedState state(unit);
  auto& reduction = state->reduction;
  if (const auto other = reduction.sink(); other && other != sink) {
    throw UsageError(
        "unit '{}': another optimizer steps in backward already; give one optimizer all parameters of the unit, "
        "in groups, or shard them as units of their own",
        unit.name());
  }
  reduction.set_sink(sink);
}

bool end_step(Unit& unit) {
  return LockedState(unit)->reduction.end_step();
}

void expect_gradient_kept(Unit& unit, const at::Tensor& shard, std::string_view what) {
  const LockedState state(unit);
  const auto sink = state->reduction.sink();
  if (!sink || !sink->takes(shard)) return;
  throw UsageError("{}: the optimizer of unit '{}' steps in backward, which leaves no gradients; call its step_after_backward() first",
                   what, unit.name());
}

}  // namespace tessera
