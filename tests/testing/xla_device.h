// For tests: the XLA device of a process, which the first test makes.
#pragma once

#include "tessera/xla/device/device.h"

namespace tessera::xla {

inline at::Device device_for_tests() {
  static const auto device = make_device();
  return device;
}

}  // namespace tessera::xla
