// StopSignal: lets a training loop save and end when the process is told to stop.
#pragma once

#include <csignal>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera::train {

struct StopOptions {
  /// Ctrl-C, and what batch systems send before the time is up.
  std::vector<int> signals = {SIGINT, SIGTERM, SIGUSR1};
};

/// From its creation on, the first of these signals only makes requested() true. Those that follow within a second count as the same one;
/// later ones do what they did before. The destructor gives the signals back as well.
class StopSignal {
 public:
  explicit StopSignal(Communicator world, StopOptions options = {});
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;
  ~StopSignal();

  /// Whether any rank was told to stop, the same on all ranks: signals reach ranks at different moments, and some of them only one rank.
  /// Collective: ask after each step, or after each tenth. It costs an all-reduce of one value.
  bool requested();

 private:
  const Communicator world_;
  const StopOptions options_;
  const int before_;  // how many signals had come
  bool requested_ = false;
};

}  // namespace tessera::train
