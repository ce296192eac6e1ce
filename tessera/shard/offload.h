// Options of offloading: where values are kept between their uses.
#pragma once

#include <c10/core/Device.h>

#include <string_view>

#include "tessera/base/disk_memory.h"

namespace tessera {

/// Where values are kept between their uses.
enum class OffloadTo {
  Nowhere,  // values stay on the device that computes with them
  Host,     // pinned host memory; ConfigError if the host computes with the values anyway
  Disk,     // unnamed files that are mapped into memory, and read ahead
};

/// Which tensors of a unit are offloaded between their uses. The state of an optimizer is offloaded by Optimizer::offload_state.
struct OffloadOptions {
  /// Where the shards are kept. If they are offloaded, their unit has Residence::Gathered. With Host, shards, their gradients and the state
  /// of optimizers are CPU tensors, which the CPU updates, and units are unsharded on the device of the communicator.
  OffloadTo parameters = OffloadTo::Nowhere;
  OffloadTo gradients = OffloadTo::Nowhere;  // where the gradients of shards are kept; always on the host if the shards are
  DiskMemoryOptions disk = {};
};

/// Throws ConfigError if tensors on this device can't be offloaded to `to`, or are kept there already. `what` names the tensors: "the
/// parameters".
void expect_possible(OffloadTo to, std::string_view what, const DiskMemoryOptions& disk, at::Device device);

}  // namespace tessera
