// The state of a random generator in a checkpoint.
#pragma once

#include <ATen/core/Generator.h>

#include <optional>
#include <string>

#include "tessera/checkpoint/stored/manifest.h"
#include "tessera/comm/communicator.h"

namespace tessera::checkpoint {

/// Returns the generator that the rank had when it saved. If fewer ranks have saved, returns a generator that no other rank gets. Returns
/// nothing if the checkpoint has no generators. Throws IoError for an invalid state.
std::optional<at::Generator> read_generator(const CatalogReader& stored, const Manifest& manifest, int rank);
/// Does the same for the device that this rank trains on: returns a state for the device's default generator. Logs a message and returns an
/// undefined tensor if the checkpoint has a state of another kind of device.
at::Tensor read_device_generator(const CatalogReader& stored, const Manifest& manifest, int rank, c10::Device device);

/// Returns the state of the device's generator as it is stored, even if this process has no such device; undefined if the checkpoint has
/// none.
at::Tensor stored_device_generator(const CatalogReader& stored, const Manifest& manifest, int rank);

/// The device that the ranks train on, or the CPU if libtorch has no default generator for that device.
c10::Device device_with_generator(const Communicator& world);
/// The name under which a checkpoint stores the state of a device's generator.
std::string generator_name(c10::Device device);
/// The state of the default generator of a device, in host memory.
at::Tensor state_of_generator(c10::Device device);
void set_generator(c10::Device device, const at::Tensor& state);

}  // namespace tessera::checkpoint
