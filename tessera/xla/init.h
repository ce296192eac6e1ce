// XLA devices for a program: one PJRT plugin, one device `xla` whose tensors have a value on each replica.
#pragma once

#include "tessera/comm/communicator.h"
#include "tessera/xla/metrics.h"
#include "tessera/xla/options.h"
#include "tessera/xla/training.h"

namespace tessera::xla {

/// Makes the device, once in a process, before its first backward pass: libtorch counts devices only once. The communicator's ranks are the
/// replicas, its traits().device is the device, and its operations are part of the program that is traced.
Communicator init(const XlaOptions& options = {});

}  // namespace tessera::xla
