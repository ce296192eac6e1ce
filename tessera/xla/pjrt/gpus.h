// Descriptions of GPUs for XLA's compiler on hosts that have none.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/xla/pjrt/options.h"

namespace tessera::pjrt {

struct GpuTopology {
  Options options;  // from which the GPU plugin makes a topology
  int64_t memory;   // of each device, in bytes
};

/// Parses "h100:1x16x8" (slices, hosts, devices of a host) for the GPU plugin. Returns nothing if the GPU is not known. Throws ConfigError
/// for a shape of another form.
std::optional<GpuTopology> gpu_topology(std::string_view name);

}  // namespace tessera::pjrt
