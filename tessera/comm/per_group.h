// What the units of one group of ranks have together, found by the group, gone with the last of its users.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "tessera/comm/communicator.h"

namespace tessera {

/// The group's T, made by `make()` if there is none. A T or its users must keep the group, whose address it is found by.
template <class T, class Make>
std::shared_ptr<T> one_per_group(const Communicator& group, const Make& make) {
  static std::mutex mutex;
  static std::map<const void*, std::weak_ptr<T>> all;
  const std::lock_guard lock(mutex);
  std::erase_if(all, [](const auto& entry) { return entry.second.expired(); });
  auto& known = all[&group.traits()];
  auto found = known.lock();
  if (!found) known = found = make();
  return found;
}

}  // namespace tessera
