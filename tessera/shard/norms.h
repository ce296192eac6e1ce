// The norm of all gradients of a model, and clipping to it.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>

namespace tessera {

struct NormOptions {
  double p = 2;  // std::numeric_limits<double>::infinity() for the largest value
};

/// Scales the gradients down, in place, so that the norm over all ranks is at most `max_norm`; returns the norm before, computed in float32
/// at least, as a tensor that no rank has to wait for. Takes what `parameters()` returns: shards, and whole parameters that every rank has
/// alike. Collective: one all-reduce for each mesh, of which a model nearly always has one.
at::Tensor clip_grad_norm(std::span<const at::Tensor> parameters, double max_norm, const NormOptions& options = {});
at::Tensor grad_norm(std::span<const at::Tensor> parameters, const NormOptions& options = {});

/// What clipping multiplies gradients of that norm with.
at::Tensor clip_factor(const at::Tensor& norm, double max_norm);

}  // namespace tessera
