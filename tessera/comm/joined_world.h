// Remembers the worlds that init returns, for calls that are given none.
#pragma once

#include "tessera/comm/communicator.h"

namespace tessera {

/// Remembers the world as long as it exists, and returns it.
Communicator remember_joined(Communicator world);

/// The world that init returned last to this thread, or else to this process. Throws UsageError if no such world exists, or if threads of
/// the process have joined as different ranks.
Communicator joined_world();

}  // namespace tessera
