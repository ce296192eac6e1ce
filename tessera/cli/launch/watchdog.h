// Watchdog: a separate process that outlives the launcher and, if the launcher is killed, kills the process groups of the ranks.
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

  /// Sets the process group to kill when this process ends; 0 for none. `place` is one of the `groups` places of the constructor.
  void watch(int place, pid_t group) { groups_[place] = group; }

  /// If the watchdog's process has ended, starts it again and returns true. Throws IoError if it can't be started now.
  bool revive();

 private:
  void start();

  int size_;
  std::atomic<pid_t>* groups_;  // shared with the watchdog
  Fd lifeline_;                 // the watchdog reads its other end; the kernel closes it when this process ends, even by kill -9
  pid_t pid_ = -1;
};

}  // namespace tessera::cli
