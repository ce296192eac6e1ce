// Buffers of a module (running means and the like): each rank has its own, and drifts.
#pragma once

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

/// Makes the buffers of all ranks alike: before an evaluation, or before a save. Collective.
void sync_buffers(const torch::nn::Module& module, const Communicator& world, BufferSync sync = BufferSync::Rank0);

}  // namespace tessera
