// Buffers of a module (running means and the like): each rank has its own, and drifts.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "tessera/comm/communicator.h"

namespace torch::nn {
class Module;
}

namespace tessera {

enum class BufferSync {
  Rank0,  // rank 0's become everybody's
  Mean,   // the mean of all ranks, for floating ones; of others rank 0's
  None,
};

/// What a buffer becomes: a copy. Collective, but for None; all ranks call in the same order.
at::Tensor synced(const std::string& name, const at::Tensor& buffer, const Communicator& world, BufferSync sync);

/// Makes the buffers of all ranks alike: before an evaluation, or before a save. Collective.
void sync_buffers(const torch::nn::Module& module, const Communicator& world, BufferSync sync = BufferSync::Rank0);

}  // namespace tessera
