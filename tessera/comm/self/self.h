// A world of one rank, on the same code path as any other world.
#pragma once

#include <optional>

#include "tessera/comm/communicator.h"

namespace tessera {

/// Errors name the rank by `world_rank`, its number in the world to which it belongs. `device` is that of TESSERA_DEVICE unless given. On a
/// device, operations are copies in the calling thread.
Communicator self_world(int world_rank = 0, std::optional<c10::Device> device = {});

}  // namespace tessera
