// Runs tests that were written for the CPU on another device.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera::testing {

/// Whether tensors are made on the CPU, as they are without TESSERA_DEVICE. Some tests are about host memory alone.
bool on_cpu();

/// Returns the tensor on the default device. For literals (at::tensor), which are always made in host memory.
at::Tensor here(const at::Tensor& tensor);

/// A generator of the default device.
at::Generator seeded_generator(uint64_t seed);

/// If TESSERA_DEVICE names a device other than the CPU ("delayed" is the device of delayed_device.h), tensors that are made without saying
/// where are made there from now on, as after torch.set_default_device in Python. Sums are then taken in a fixed order, and products in
/// full precision. A crash prints where it was.
void use_default_device();

}  // namespace tessera::testing
