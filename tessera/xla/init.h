// Starts XLA for this process: one PJRT plugin, and one device `xla` whose tensors have a value on each replica.
#pragma once

#include "tessera/comm/communicator.h"
#include "tessera/xla/metrics.h"
#include "tessera/xla/options.h"
#include "tessera/xla/training.h"

namespace tessera::xla {

/// Makes the device, and returns a communicator whose ranks are the replicas and whose traits().device is the device. Its collectives
/// become operations of the traced program. Call it once in a process, before the first backward pass: only in that pass does libtorch
/// start a thread for each device.
Communicator init(const XlaOptions& options = {});

}  // namespace tessera::xla
