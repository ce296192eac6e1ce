// Description of a device, known without using it.
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
  /// In bytes, where the plugin tells.
  std::optional<int64_t> memory;
  /// The peak of bytes that this process has had in use, where the plugin tells.
  std::optional<int64_t> peak_memory;
  Options attributes;
};

}  // namespace tessera::pjrt
