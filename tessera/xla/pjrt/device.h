// Describes a device, which need not be on this host.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tessera/xla/pjrt/options.h"

namespace tessera::pjrt {

struct DeviceDescription {
  int id = 0;
  /// Such as "cpu", "TPU v5p" or "NVIDIA H100".
  std::string kind;
  /// The device's memory in bytes; nothing if the plugin does not report it.
  std::optional<int64_t> memory;
  /// The most bytes that this process has had in use; nothing if the plugin does not report it.
  std::optional<int64_t> peak_memory;
  Options attributes;
};

}  // namespace tessera::pjrt
