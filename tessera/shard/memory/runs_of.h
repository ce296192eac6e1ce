// Neighbours in a list that are treated together.
#pragma once

#include <cstddef>
#include <span>

namespace tessera {

/// Calls `act` with each run of neighbours that have the same key. With the dtype as the key, all buffers of a dtype take part in one
/// collective: an eager transport saves exchanges, and a tracing one ties them together.
template <class Item, class Key, class Act>
void for_each_run(std::span<const Item> items, const Key& key, const Act& act) {
  for (size_t first = 0; first < items.size();) {
    size_t next = first + 1;
    while (next < items.size() && key(items[next]) == key(items[first])) next++;
    act(items.subspan(first, next - first));
    first = next;
  }
}

}  // namespace tessera
