// Starts XLA for this process: one PJRT plugin, and one device `xla` whose tensors have a value on each replica.
#pragma once

#include "tessera/comm/communicator.h"
#include "tessera/xla/metrics.h"
#include "tessera/xla/options.h"
#include "tessera/xla/training.h"

namespace tessera::xla {

/// Makes the device, and returns a communicator whose ranks are the replicas and whose traits().device is the device; its operations are
/// traced into the program. Call it once in a process, before the first backward pass: libtorch counts devices only in that pass.
Communicator init(const XlaOptions& options = {});

}  // namespace tessera::xla
