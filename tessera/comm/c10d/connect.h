// The rows of engines that move data by collectives of c10d.
#pragma once

#include "tessera/comm/engine.h"

namespace tessera {

/// gloo's own collectives, in host memory: the same transport as on devices, for hosts that have none.
Connection connect_gloo_collectives(const Meeting& meeting);

std::string why_no_nccl();
Connection connect_nccl(const Meeting& meeting);

}  // namespace tessera
