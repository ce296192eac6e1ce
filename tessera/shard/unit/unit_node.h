// The place of a unit in the autograd graph: the engine calls it once per backward pass, when all gradients of the unit are there.
#pragma once

#include <memory>

namespace tessera {

class Unit;

/// Gives those parameters of the unit whose shards require gradients edges into a new node, whose next edges are the shards; the others
/// get none. Called again, by the next operator, when that has changed; graphs that exist keep the node that they were built with.
void attach_unit_node(const std::shared_ptr<Unit>& unit);

}  // namespace tessera
