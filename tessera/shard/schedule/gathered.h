// All-gathers tensors in the layout of a unit's shards, apart from the unit's own memory: copies of parameters, gradients, optimizer state.
#pragma once

#include "tessera/shard/unit/unit.h"

namespace tessera {

/// All-gathers a flat tensor that has the layout of this rank's chunk. Collective.
at::Tensor gathered(Unit& unit, const Unit::Group& group, const at::Tensor& own_flat);
/// The part of a gathered tensor that belongs to one parameter, in its shape.
at::Tensor unsharded_view(const at::Tensor& gathered, const Unit::Parameter& parameter);

}  // namespace tessera
