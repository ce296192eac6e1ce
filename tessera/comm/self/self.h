// A world of one rank, on the same code path as any other world.
#pragma once

#include "tessera/comm/communicator.h"

namespace tessera {

/// Errors name the rank by its number in the world to which it belongs.
Communicator self_world(int world_rank = 0);

}  // namespace tessera
