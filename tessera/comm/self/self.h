// A world of one rank, on the same code path as any other world.
#pragma once

#include "tessera/comm/communicator.h"

namespace tessera {

Communicator self_world();

}  // namespace tessera
