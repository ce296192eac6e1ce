// A world of one rank, on the same code path as any other world.
#pragma once

#include <optional>

#include "tessera/comm/communicator.h"

namespace tessera {

/// Errors name the rank by its number in the world to which it belongs. `device`: TESSERA_DEVICE's unless given;
/// there, what would be moved is copied, in the calling thread.
Communicator self_world(int world_rank = 0, std::optional<c10::Device> device = {});

}  // namespace tessera
