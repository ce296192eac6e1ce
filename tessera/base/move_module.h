// Moves modules to other devices.
#pragma once

#include <c10/core/Device.h>

#include "tessera/base/module_ref.h"

namespace tessera {

/// Moves the parameters and buffers that have values to the device, which may be one that Module::to does not know. They stay the same tensors.
void move_module(ModuleRef module, c10::Device device);

}  // namespace tessera
