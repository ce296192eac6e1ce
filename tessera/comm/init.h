// Joins the world: finds out which rank this process is, meets the other ranks, and chooses their transport.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <optional>

#include "tessera/comm/communicator.h"

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace tessera {

struct InitOptions {
  /// The name of an engine (`tessera env` lists them), or auto: self for a single process, shm for ranks of one host that can share memory,
  /// gloo otherwise. Empty: TESSERA_TRANSPORT, or else auto.
  std::string transport = {};
  /// Where the tensors of this rank are: c10::kCUDA is the GPU with the rank's number on its host; with c10::kXLA this one process is all
  /// ranks, and TESSERA_XLA_DEVICES says how many. Unset: TESSERA_DEVICE, or else the CPU. On GPUs, transport auto is nccl if each rank has
  /// a GPU of its own; otherwise data goes through host memory.
  std::optional<c10::Device> device = {};
  /// The name of this rank's host: ranks with the same name share memory. Empty: TESSERA_HOST_ID, or else the machine.
  std::string host = {};
  std::chrono::milliseconds start_limit = kStartLimit;
  std::chrono::milliseconds start_notice = std::chrono::seconds(10);  // after this time, a warning names the missing ranks
  std::chrono::milliseconds operation_limit = kOperationLimit;
};

/// Joins the world that the environment describes: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them, or the variables of
/// mpirun or srun. Without them the process is a world of one. TESSERA_STORE=file:/path makes the ranks meet in a new file instead of at
/// MASTER_ADDR. Blocks until all ranks have joined. After `start_limit` it throws an error that names the missing ranks.
Communicator init(const InitOptions& options = {});

/// The number of this rank on its host, for choosing a device: LOCAL_RANK, or the variable of mpirun or srun. 0 for a single process.
int local_rank();

/// Joins through a store that the program already has.
Communicator init(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size, const InitOptions& options = {});

/// Joins the ranks of a process group that the program already has, over that group's own backend for host memory.
Communicator init(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const InitOptions& options = {});

}  // namespace tessera
