// Links through shared memory among the processes of each host, which find the memory through the store.
#pragma once

#include "tessera/comm/engine.h"

namespace tessera {

std::string why_no_shm();
/// Connects the ranks of this host; all ranks of the meeting call it, on all hosts. Throws TimeoutError if ranks are still missing at the
/// end of the start's time limit.
Connection connect_shm(const Meeting& meeting);

}  // namespace tessera
