// Collectives as functions that autograd differentiates. The methods of Communicator, in contrast, write in place and have no gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/comm/communicator.h"

namespace tessera::nn {

// Gradients are those of the sum of the losses of all ranks, as torch.distributed.nn.functional has them. A sharded model averages the
// gradients of its parameters over the ranks, which makes them the gradients of the mean of all losses. If one rank runs backward through
// such a function, all ranks must. The gradients can be differentiated again. If ranks pass tensors of different shapes, every rank gets a
// DisagreementError.

/// The sum of the tensors of all ranks, or their mean. Minima and maxima have no gradient, and refuse tensors that require one.
at::Tensor all_reduce(const at::Tensor& tensor, const Communicator& world, Reduce op = Reduce::Sum);

/// Concatenates the tensors of all ranks, which have equal shapes, along a dimension. Scalars become a vector.
at::Tensor all_gather(const at::Tensor& tensor, const Communicator& world, int64_t dim = 0);

/// This rank's part, along a dimension, of the sum of the tensors of all ranks, or of their mean.
at::Tensor reduce_scatter(const at::Tensor& tensor, const Communicator& world, Reduce op = Reduce::Sum, int64_t dim = 0);

/// The tensor of rank `root`, which gets the sum of the gradients of all ranks.
at::Tensor broadcast(const at::Tensor& tensor, const Communicator& world, int root = 0);

}  // namespace tessera::nn
