// The state of a random generator in a checkpoint.
#pragma once

#include <ATen/core/Generator.h>

#include <optional>
#include <string>

#include "tessera/checkpoint/stored/manifest.h"
#include "tessera/comm/communicator.h"

namespace tessera::checkpoint {

/// The generator that a rank has had, or one that no other rank has if fewer ranks have saved; nothing if the checkpoint has none. Throws
/// IoError if its state is none: libtorch would notice only when it is set.
std::optional<at::Generator> read_generator(const CatalogReader& stored, const Manifest& manifest, int rank);
/// The same of the device that this rank trains on: a state for its default generator. Undefined, with a note, if the checkpoint has one of
/// another kind of device.
at::Tensor read_device_generator(const CatalogReader& stored, const Manifest& manifest, int rank, c10::Device device);

/// That state as it is stored, whatever the devices here; undefined if the checkpoint has none.
at::Tensor stored_device_generator(const CatalogReader& stored, const Manifest& manifest, int rank);

/// The device that the ranks train on, or the CPU if that device has no generator of its own that checkpoints hold.
c10::Device device_with_generator(const Communicator& world);
/// The name of its state in a run.
std::string generator_name(c10::Device device);
/// The state of the default generator of a device, in host memory.
at::Tensor state_of_generator(c10::Device device);
void set_generator(c10::Device device, const at::Tensor& state);

}  // namespace tessera::checkpoint
