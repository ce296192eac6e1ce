// Ranks on paper: one process plays one rank of a group whose other members do whatever it does. For dry runs at any world size, and
// for telling what a program costs without its collectives.
#pragma once

#include "tessera/comm/communicator.h"

namespace tessera {

/// Rank `rank` of `size`. Sizes, dtypes, limits and traffic are those of a real group; values are stand-ins: gathers repeat the own part.
Communicator fake_world(int rank, int size);

}  // namespace tessera
