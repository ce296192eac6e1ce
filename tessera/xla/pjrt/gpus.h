// GPUs that XLA's compiler is told about where none is.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/xla/pjrt/options.h"

namespace tessera::pjrt {

struct GpuTopology {
  Options options;  // for the plugin
  int64_t memory;   // of a device
};

/// Of "h100:1x16x8": slices, hosts and devices of a host, for the plugin of GPUs. Nothing if it names no GPU that is known. Throws ConfigError
/// for another shape.
std::optional<GpuTopology> gpu_topology(std::string_view name);

}  // namespace tessera::pjrt
