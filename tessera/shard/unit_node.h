// The place of a unit in the autograd graph: the engine calls it once per backward pass, when all gradients of the unit are there.
#pragma once

#include <memory>

namespace tessera {

class Unit;

/// Gives the unit's trainable parameters gradient edges into a node of their own, whose next edges are the shards.
void attach_unit_node(const std::shared_ptr<Unit>& unit);

}  // namespace tessera
