// Lists of distinct groups, for code that runs one collective for each group that it meets.
#pragma once

#include "tessera/comm/communicator.h"

namespace tessera {

/// The index of a group in a list of distinct groups. Appends the group if the list does not have it.
template <class List>
size_t find_or_add(List& groups, const Communicator& group) {
  size_t place = 0;
  while (place < groups.size() && !groups[place].same_group(group)) place++;
  if (place == groups.size()) groups.push_back(group);
  return place;
}

}  // namespace tessera
