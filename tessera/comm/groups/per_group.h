// An object that all users of one group of ranks share.
#pragma once

#include <c10/util/FunctionRef.h>

#include <map>
#include <memory>
#include <mutex>

#include "tessera/comm/communicator.h"

namespace tessera {

/// Keeps one T for each group as long as somebody owns that T. The owners of a T must also keep its group, because groups are told apart by
/// address.
template <class T>
class PerGroup {
 public:
  std::shared_ptr<T> get(const Communicator& group, c10::function_ref<std::shared_ptr<T>()> make) {
    const std::lock_guard lock(mutex_);
    std::erase_if(known_, [](const auto& entry) { return entry.second.expired(); });
    auto& known = known_[group.id()];
    auto result = known.lock();
    if (!result) known = result = make();
    return result;
  }

 private:
  std::mutex mutex_;
  std::map<const void*, std::weak_ptr<T>> known_;
};

}  // namespace tessera
