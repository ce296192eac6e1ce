// The other side of every parity test: the same ranks and batches with whole parameters, gradients averaged in rank order.
#pragma once

#include <torch/torch.h>

#include "tessera/comm/communicator.h"

namespace tessera::testing {

inline void average_gradients(const torch::nn::Module& module, const Communicator& world) {
  for (const auto& parameter : module.parameters()) {
    if (!parameter.grad().defined()) continue;
    auto gradient = parameter.grad().contiguous();
    world.all_reduce(gradient, {.op = Reduce::Mean}).wait();
    parameter.mutable_grad() = gradient;
  }
}

}  // namespace tessera::testing
