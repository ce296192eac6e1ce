// Checks whether all ranks have the same number or text, and tells what differs.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/comm/communicator.h"

namespace tessera {

/// Collective: whether all ranks have the same number, such as a hash of settings that must not differ.
bool same_on_all(const Communicator& world, uint64_t number, Subject subject);

/// Collective: compares the ranks' lines. A line has a subject that no other line has, a tab, a text about the subject, and a line end.
/// Returns the first difference, "rank 0: lr 1; ranks 1 and 2: lr 2", or nothing.
std::string difference_on_ranks(const Communicator& world, const std::string& lines, const Subject& subject);

}  // namespace tessera
