// Makes c10d's NCCL backend. Only this source depends on NCCL; it is built when libtorch's CUDA part is linked.
#pragma once

#include "tessera/comm/c10d/collectives.h"
#include "tessera/comm/host/rendezvous.h"

namespace tessera {

BackendPtr make_nccl(const StorePtr& store, int rank, int size);

}  // namespace tessera
