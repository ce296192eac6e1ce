// For tests: a process has one XLA device, which the first of them makes.
#pragma once

#include "tessera/xla/device/device.h"

namespace tessera::xla {

inline at::Device device_for_tests() {
  static const auto device = make_device();
  return device;
}

}  // namespace tessera::xla
