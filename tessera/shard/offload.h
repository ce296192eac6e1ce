// Where values lie while nobody uses them.
#pragma once

#include <c10/core/Device.h>

#include <string_view>

#include "tessera/base/disk_memory.h"

namespace tessera {

/// Where values lie while nobody uses them.
enum class OffloadTo {
  Nowhere,  // where they are computed with
  Host,     // in pinned host memory, if they are computed with on a device. ConfigError if that is the host
  Disk,     // in files without names that are mapped into memory, and read ahead
};

/// What takes room between its uses elsewhere than where it is computed with. The state of an optimizer is offloaded by the optimizer.
struct OffloadOptions {
  /// The shards; units are then gathered. With Host, shards, their gradients and so the state of optimizers are tensors of the CPU, which
  /// updates them, and units are unsharded on the device, where the communicator is.
  OffloadTo parameters = OffloadTo::Nowhere;
  OffloadTo gradients = OffloadTo::Nowhere;  // of the shards; with parameters on the host, they are there, too
  DiskMemoryOptions disk = {};
};

/// Throws ConfigError if what lies on this device can't be offloaded like that, or needs not. `what` is "the parameters".
void expect_possible(OffloadTo to, std::string_view what, const DiskMemoryOptions& disk, at::Device device);

}  // namespace tessera
