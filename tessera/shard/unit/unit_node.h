// The node of a unit in the autograd graph. The engine calls it once per backward pass, when all gradients of the unit are complete.
#pragma once

#include <memory>

namespace tessera {

class ScheduleLock;
class Unit;

/// Makes a new node whose next edges lead to the shards, and gives every trainable parameter of the unit a gradient edge to it. Frozen
/// parameters get no edge. It is called again when parameters are frozen or thawed; existing graphs keep the node that they were built
/// with.
void attach_unit_node(const std::shared_ptr<Unit>& unit);

/// Reduces, outside of backward, what passes without a reduction have left, and accumulates it in the gradients of the shards. Where unused
/// parameters count as zero, those without a gradient take part with zeros.
void reduce_unsynced(const std::shared_ptr<Unit>& unit, const ScheduleLock& held);

/// Whether some of its parameters are trained at the moment.
bool is_trained(const Unit& unit);

}  // namespace tessera
