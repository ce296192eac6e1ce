// Makes c10d's NCCL backend. The only source that is particular to it is built when libtorch's CUDA part is linked.
#pragma once

#include <c10/core/Device.h>

#include <chrono>

#include "tessera/comm/c10d/collectives.h"
#include "tessera/comm/host/rendezvous.h"

namespace tessera {

int gpus_here();
/// The GPU of this rank, by its number on its host. Throws ConfigError if there is none.
c10::Device own_gpu();
BackendPtr make_nccl(const StorePtr& store, int rank, int size, std::chrono::milliseconds limit);

}  // namespace tessera
