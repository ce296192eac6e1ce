// Simulated ranks: one process plays one rank of a group, and its simulated peers do whatever it does. For dry runs at any world size, and
// for measuring a program without the cost of its collectives.
#pragma once

#include "tessera/comm/communicator.h"

namespace tessera {

/// Makes the world of rank `rank` of `size`. Sizes, dtypes, limits and traffic are those of a real group. Values are placeholders: an
/// all-gather repeats this rank's part.
Communicator fake_world(int rank, int size);

}  // namespace tessera
