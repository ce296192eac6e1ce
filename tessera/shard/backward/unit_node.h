// The node of a unit in the autograd graph. The engine calls it once per backward pass, when all gradients of the unit are complete.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace tessera {

class Unit;

/// Makes a new node whose next edges lead to the shards, and gives every trainable parameter of the unit a gradient edge to it. Frozen
/// parameters get no edge. It is called again when parameters are frozen or thawed; existing graphs keep the node that they were built
/// with.
void attach_unit_node(const std::shared_ptr<Unit>& unit);
/// Called before an operator that builds a graph uses an unsharded parameter or a view of it. Applies changes of requires_grad since the
/// last pass to all parameters at once, so that a pass has one node and one reduction for the unit.
void follow_training(Unit& unit, const at::Tensor& used);

/// Reduces the unit's unsynced gradients, outside of backward, and accumulates them in the gradients of the shards. With
/// UnusedParameters::Zeros, parameters without a gradient get a gradient of zeros.
void reduce_unsynced(Unit& unit);

}  // namespace tessera
