// The norm of all gradients of a model, and gradient clipping.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>

namespace tessera {

struct NormOptions {
  double p = 2;  // std::numeric_limits<double>::infinity() gives the largest absolute value
};

/// Scales the gradients in place so that their norm over all ranks is at most `max_norm`. Returns the norm before clipping, computed in at
/// least float32, as a tensor that stays on the device. `parameters` is the result of tessera::parameters(): shards, and parameters in no
/// unit, whose gradients must be the same on all ranks. Units that are sharded over only a part of the ranks (experts) have different
/// parameters on each part, and the norm includes all of these. Collective: one all-reduce for each shard group; nearly all models have
/// only one group.
at::Tensor clip_grad_norm(std::span<const at::Tensor> parameters, double max_norm, const NormOptions& options = {});
/// Returns the norm without clipping. Collective in the same way.
at::Tensor grad_norm(std::span<const at::Tensor> parameters, const NormOptions& options = {});

/// Whether the gradients are finite on all ranks: none is inf or NaN. Collective: one all-reduce.
bool gradients_are_finite(std::span<const at::Tensor> parameters);

/// Limits each value of the gradients to -clip_value to clip_value, in place.
void clip_grad_value(std::span<const at::Tensor> parameters, double clip_value);

}  // namespace tessera
