// The way into the group: who this process is, how the ranks find each other, what they talk over.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include "tessera/comm/communicator.h"

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace tessera {

enum class TransportKind {
  Auto,  // a lone process: self; ranks of one host that can share memory: shm; otherwise gloo
  Self,
  Shm,
  Gloo,
};

struct InitOptions {
  TransportKind transport = TransportKind::Auto;  // TESSERA_TRANSPORT=auto|self|shm|gloo speaks louder
  std::chrono::milliseconds start_limit = kStartLimit;
  std::chrono::milliseconds operation_limit = kOperationLimit;
};

/// Joins the world that the environment describes: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them, or the variables
/// of Open MPI's mpirun. Without them the process is a world of one. TESSERA_STORE=file:/path lets the ranks meet in a fresh file
/// instead of at MASTER_ADDR. Blocks until all ranks have come, and throws an error that names those that have not.
Communicator init(const InitOptions& options = {});

/// This rank's number among those of its host, for choosing a device: LOCAL_RANK, or what mpirun says. 0 for a lone process.
int local_rank();

/// Joins by a store that the program has already.
Communicator init(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size, const InitOptions& options = {});

/// Joins the ranks of a process group that the program has already, over that group's own backend for host memory.
Communicator init(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const InitOptions& options = {});

}  // namespace tessera
