// The norm of all gradients of a model, and gradient clipping.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>

namespace tessera {

struct NormOptions {
  double p = 2;  // std::numeric_limits<double>::infinity() for the largest value
};

/// Scales the gradients in place so that their norm over all ranks is at most `max_norm`. Returns the norm before clipping, computed in at
/// least float32, as a tensor that stays on the device. Takes what `parameters()` returns: shards, and parameters in no unit, whose
/// gradients must be the same on all ranks. Units on a part of the ranks (experts) are different parameters on each part, and all of them
/// count. Collective: one all-reduce for each shard group, and a model nearly always has only one.
at::Tensor clip_grad_norm(std::span<const at::Tensor> parameters, double max_norm, const NormOptions& options = {});
/// Returns the norm without clipping. Collective in the same way.
at::Tensor grad_norm(std::span<const at::Tensor> parameters, const NormOptions& options = {});

/// Whether the gradients are finite on all ranks: none is inf or NaN. Collective: one all-reduce.
bool gradients_are_finite(std::span<const at::Tensor> parameters);

/// Limits each value of the gradients to -clip_value to clip_value, in place.
void clip_grad_value(std::span<const at::Tensor> parameters, double clip_value);

}  // namespace tessera
