// Chooses the device on which the tensors of a world are.
#pragma once

#include <c10/core/Device.h>

#include <string>
#include <string_view>

namespace tessera {

/// The device of worlds whose program names no device: TESSERA_DEVICE, or the CPU if that is unset.
c10::Device default_device();

/// How many devices of this type this process sees; 0 also if this libtorch does not support them.
int devices_here(c10::DeviceType type);

/// Why this build does not support devices of the kind, "xla" or "cuda", and the way out.
std::string why_none_of(std::string_view kind);

/// The device of a rank with this number on its host: `wanted`, or if that has no index, the device with the rank's number. If there are
/// more ranks than devices, ranks share devices. Throws ConfigError if there is none.
c10::Device own_device(c10::Device wanted, int local_rank);

/// A name that distinguishes the devices of this host, even if each process numbers the devices that it sees from 0 (CUDA_VISIBLE_DEVICES).
std::string name_on_host(c10::Device device);

/// Makes the device the current one of the calling thread, so that "cuda" means this device.
void make_current(c10::Device device);

}  // namespace tessera
