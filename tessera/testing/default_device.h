// Runs tests that were written for the CPU on another device.
#pragma once

namespace tessera::testing {

/// If TESSERA_DEVICE names a device other than the CPU ("delayed" is that of delayed_device.h), tensors that are made without saying where are made
/// there from now on, as after torch.set_default_device in Python. Sums are then taken in a fixed order, and products in full precision.
void use_default_device();

}  // namespace tessera::testing
