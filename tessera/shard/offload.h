// Where values lie while nobody uses them.
#pragma once

#include <c10/core/Device.h>

#include <string_view>

#include "tessera/base/disk_memory.h"

namespace tessera {

/// Where values lie while nobody uses them.
enum class OffloadTo {
  Nowhere,  // where they are computed with
  Host,     // in host memory: activations on a device only, so far. ConfigError for all others
  Disk,     // in files without names that are mapped into memory, and read ahead
};

/// What takes room between its uses elsewhere than where it is computed with. The state of an optimizer is offloaded by the optimizer.
struct OffloadOptions {
  OffloadTo parameters = OffloadTo::Nowhere;  // the shards; units are then gathered
  OffloadTo gradients = OffloadTo::Nowhere;   // of the shards
  DiskMemoryOptions disk = {};
};

/// Throws ConfigError if what lies on this device can't be offloaded like that, or needs not. `what` is "the parameters".
void expect_possible(OffloadTo to, std::string_view what, const DiskMemoryOptions& disk, at::Device device);

}  // namespace tessera
