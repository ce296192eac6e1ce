// Modules on other devices.
#pragma once

#include <c10/core/Device.h>

namespace torch::nn {
class Module;
}

namespace tessera {

/// Moves the parameters and buffers that have values to the device, which may be one that Module::to does not know. They stay the same tensors.
void move_module(const torch::nn::Module& module, c10::Device device);

}  // namespace tessera
