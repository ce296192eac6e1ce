// Collectives among replicas: an engine whose ranks are the devices of one process, and whose operations are nodes of the graph.
#pragma once

#include "tessera/comm/communicator.h"

namespace tessera::xla {

/// Returns the communicator of all replicas of the device, which must exist.
Communicator replica_world();

}  // namespace tessera::xla
