// Words for messages.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace tessera {

/// "rank 2", "ranks 0, 1 and 3"
std::string name_ranks(std::span<const int> ranks);

/// "'a', 'b' and 7 more"
std::string some_of(const std::vector<std::string>& names);

}  // namespace tessera
