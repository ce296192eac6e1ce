// StopSignal: lets a training loop save and end when the process is told to stop.
#pragma once

#include <csignal>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera::train {

struct StopOptions {
  /// The signal of Ctrl-C, and those that batch systems send before a job's time is up.
  std::vector<int> signals = {SIGINT, SIGTERM, SIGUSR1};
};

/// As long as the object exists, the first of these signals only makes requested() true. Signals within a second after it count as the same
/// signal; later ones have the effect that they had before the object was made. The destructor also restores the earlier handlers.
class StopSignal {
 public:
  explicit StopSignal(Communicator world, StopOptions options = {});
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;
  ~StopSignal();

  /// Whether any rank has got a signal to stop. The answer is the same on all ranks, although a signal may reach ranks at different
  /// moments, or reach only one rank. Collective: call it after each step, or after each tenth step. It costs an all-reduce of one value.
  bool requested();

 private:
  const Communicator world_;
  const StopOptions options_;
  const int before_;  // how many signals had come before the object was made
  bool requested_ = false;
};

}  // namespace tessera::train
