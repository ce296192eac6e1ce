// Whether all ranks have the same, and what differs if they don't.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera {

/// Of a number, such as a hash of what must not differ. Collective.
bool same_on_all(const Communicator& world, uint64_t number, Subject subject);

/// Of lines: the subject of each, which no other line has, a tab, and what is said of it. Returns the first that differs, "rank 0: lr 1;
/// ranks 1 and 2: lr 2", or nothing. Collective.
std::string difference_on_ranks(const Communicator& world, const std::string& lines, const Subject& subject);

}  // namespace tessera
