// Freezing and thawing sharded parameters, and skipping an optimizer step on some ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>

#include "tessera/base/module_ref.h"

namespace tessera {

enum class Training { Frozen, Trained };
/// Freezes or thaws all parameters of a module, sharded or not. Takes effect with the next operator that uses such a parameter.
void set_requires_grad(ModuleRef module, Training training);

/// To be called on a rank that leaves out a step which other ranks take with an optimizer of torch::optim. Applies to the units in which a
/// parameter has a gradient. Tessera's own optimizers have a member skip_step() for this.
void skip_step(ModuleRef module);
/// The same for the units of these shards.
void skip_step(std::span<const at::Tensor> parameters);

}  // namespace tessera
