// Makes two levels of the ranks of several hosts: shared memory within each host, an engine's link between them.
#pragma once

#include "tessera/comm/engine.h"

namespace tessera {

/// 1 or 2: TESSERA_LEVELS.
int most_levels();

/// Collective: a connection over two levels, or `outer` itself, the same on all ranks, if there is nothing to gain or a host has no shared
/// memory. The log says which.
Connection with_two_levels(Connection outer, const Meeting& meeting);

}  // namespace tessera
