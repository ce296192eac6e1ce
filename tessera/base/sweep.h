// Removes finished entries from a container that only gets longer, without looking through all of it for each new entry.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace tessera {

/// Each container needs a Sweep of its own. The container may still have finished entries, so code that finds an entry must check it.
class Sweep {
 public:
  /// Looks through the container if it has doubled since the last time, so that n entries cost O(n) together.
  template <class Container, class IsOver>
  void operator()(Container& container, IsOver is_over) {
    if (container.size() < due_) return;
    std::erase_if(container, is_over);
    due_ = std::max(kFew, 2 * container.size());
  }

 private:
  static constexpr size_t kFew = 64;
  size_t due_ = kFew;
};

}  // namespace tessera
