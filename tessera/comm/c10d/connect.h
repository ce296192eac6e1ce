// Connects the engines that move data by collectives of c10d.
#pragma once

#include "tessera/comm/c10d/collectives.h"
#include "tessera/comm/engine.h"

namespace tessera {

/// Connects by gloo's own collectives in host memory. So CollectivesTransport, which nccl uses, also runs on hosts without a GPU.
Connection connect_gloo_collectives(const Meeting& meeting);

std::string why_no_nccl();
/// Defined in nccl.cpp.
BackendPtr make_nccl(const StorePtr& store, int rank, int size);
Connection connect_nccl(const Meeting& meeting);

}  // namespace tessera
