// Signals of the launcher, as something to poll for.
#pragma once

#include <signal.h>

#include <optional>

#include "tessera/base/fd.h"

namespace tessera::cli {

/// As long as it exists, signals that ask the launcher for something are queued in `incoming` instead of interrupting it.
struct HeldSignals {
  sigset_t before;  // what was blocked before; a rank starts with that
  Fd incoming;      // a signalfd

  /// Throws IoError.
  HeldSignals();
  HeldSignals(HeldSignals&&) = delete;
  ~HeldSignals();

  /// The next one that has come, or nothing.
  std::optional<int> take();
  /// Stops this process, as SIGTSTP asks for. The kernel decides: where no shell could continue it, it does not stop.
  static void stop_for_a_while();
};

}  // namespace tessera::cli
