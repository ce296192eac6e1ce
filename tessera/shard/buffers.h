// Synchronizes the buffers of a module (running means and the like): fully_shard does not synchronize them, so their values differ.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "tessera/base/module_ref.h"
#include "tessera/comm/communicator.h"

namespace tessera {

enum class BufferSync {
  Rank0,  // all ranks get rank 0's values
  Mean,   // floating-point buffers become the mean over all ranks, all other buffers get rank 0's values
  None,   // each rank keeps its own values
};

/// Returns a copy of the buffer with the synchronized values. Collective, except with BufferSync::None: all ranks call in the same order.
at::Tensor synced(const std::string& name, const at::Tensor& buffer, const Communicator& world, BufferSync sync);

/// Gives the buffers of all ranks the same values, for example before an evaluation or a save. Collective, except with BufferSync::None.
void sync_buffers(ModuleRef module, const Communicator& world, BufferSync sync = BufferSync::Rank0);

}  // namespace tessera
