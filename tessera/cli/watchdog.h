// A process of its own that outlives the launcher by a moment, to kill what the ranks have started when the launcher is killed itself.
#pragma once

#include <sys/types.h>

#include <atomic>

#include "tessera/base/fd.h"

namespace tessera::cli {

class Watchdog {
 public:
  explicit Watchdog(int groups);
  Watchdog(Watchdog&&) = delete;
  ~Watchdog();

  /// The process group to kill if this process ends, in one of the places that the constructor made. 0 for none.
  void watch(int place, pid_t group) { groups_[place] = group; }

 private:
  int size_;
  std::atomic<pid_t>* groups_;  // shared with the watchdog
  Fd lifeline_;                 // closes when this process ends, in whatever way
  pid_t pid_ = -1;
};

}  // namespace tessera::cli
