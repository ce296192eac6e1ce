// A world of one rank, on the same code path as any other world.
#pragma once

#include <memory>
#include <optional>

#include "tessera/comm/communicator.h"

namespace tessera {

class LinkFamily;

/// Errors name the rank by `world_rank`, its number in the world to which it belongs. `device` is that of TESSERA_DEVICE unless given. On a
/// device, operations are copies in the calling thread. `family` has the record; a new one unless given.
Communicator self_world(int world_rank = 0, std::optional<c10::Device> device = {}, std::shared_ptr<LinkFamily> family = {});

}  // namespace tessera
