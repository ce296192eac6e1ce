// What the guards of all test devices have in common: there is one device.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace tessera::testing {

struct OneDeviceGuard : c10::impl::DeviceGuardImplInterface {
  static constexpr auto kType = c10::DeviceType::PrivateUse1;

  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device /*device*/) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device /*device*/) const override {}
  void uncheckedSetDevice(c10::Device /*device*/) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  static c10::Device device() { return {kType, 0}; }
};

}  // namespace tessera::testing
