// A link through shared memory among processes of one host, which find the memory through the store.
#pragma once

#include "tessera/comm/engine.h"

namespace tessera {

std::string why_no_shm();
/// Throws TimeoutError if ranks are still missing at the end of the start's time limit.
Connection connect_shm(const Meeting& meeting);

}  // namespace tessera
