// Lets an optimizer take the gradients of units; see shard/gradient_sink.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string_view>

#include "tessera/shard/gradient_sink.h"

namespace tessera {

class Unit;

/// From the unit's next backward pass on, `sink` takes the gradients that it wants, once in every step. The unit does not keep it alive.
/// Throws UsageError if the unit has another sink.
void set_gradient_sink(Unit& unit, const std::shared_ptr<GradientSink>& sink);
/// Ends a step: the sink may take gradients of the unit again. Returns whether it has taken any since the last call.
bool end_step(Unit& unit);

/// Throws UsageError if a sink takes the gradient of this shard, which `what` needs.
void expect_gradient_kept(Unit& unit, const at::Tensor& shard, std::string_view what);

}  // namespace tessera
