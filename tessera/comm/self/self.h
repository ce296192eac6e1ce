// A lone process: a world of one, on the same path as any other.
#pragma once

#include "tessera/comm/communicator.h"

namespace tessera {

Communicator self_world();

}  // namespace tessera
