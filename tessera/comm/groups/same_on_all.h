// Whether all ranks have the same number, such as a hash of what must not differ between them.
#pragma once

#include <cstdint>

#include "tessera/comm/communicator.h"

namespace tessera {

/// Collective.
bool same_on_all(const Communicator& world, uint64_t number, Subject subject);

}  // namespace tessera
