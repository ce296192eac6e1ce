// Signals of the launcher, as something to poll for.
#pragma once

#include <signal.h>

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
};

}  // namespace tessera::cli
