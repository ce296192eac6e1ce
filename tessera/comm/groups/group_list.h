// Lists of distinct groups, for code that runs one collective for each group that it meets.
#pragma once

#include <algorithm>

#include "tessera/comm/communicator.h"

namespace tessera {

/// Whether two groups of one world have the same ranks.
inline bool same_ranks(const Communicator& a, const Communicator& b) {
  return a.same_group(b) || std::ranges::is_permutation(a.traits().world_ranks, b.traits().world_ranks);
}

/// The index of a group in a list of distinct groups. Appends the group if the list does not have it.
template <class List>
size_t find_or_add(List& groups, const Communicator& group) {
  size_t place = 0;
  while (place < groups.size() && !groups[place].same_group(group)) place++;
  if (place == groups.size()) groups.push_back(group);
  return place;
}

}  // namespace tessera
