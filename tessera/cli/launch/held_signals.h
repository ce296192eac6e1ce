// HeldSignals: turns signals to the launcher into input that it can poll for.
#pragma once

#include <signal.h>

#include <optional>

#include "tessera/base/fd.h"

namespace tessera::cli {

/// As long as the object exists, signals such as SIGINT and SIGCHLD are queued in `incoming` instead of interrupting the launcher.
struct HeldSignals {
  sigset_t before;  // the signals that were blocked before; ranks start with this mask
  Fd incoming;      // a signalfd

  /// Throws IoError.
  HeldSignals();
  HeldSignals(HeldSignals&&) = delete;
  ~HeldSignals();

  /// Returns the next signal that has come; nothing if there is none.
  std::optional<int> take();
  /// Stops this process by SIGTSTP. The kernel ignores that if there is no shell that could continue the process.
  static void stop_for_a_while();
};

}  // namespace tessera::cli
