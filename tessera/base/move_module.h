// Moves modules to other devices.
#pragma once

#include <c10/core/Device.h>

#include "tessera/base/module_ref.h"

namespace tessera {

/// Moves all parameters and buffers, except those on the meta device, to a device, which may be one that Module::to does not know. They
/// stay the same tensors.
void move_module(ModuleRef module, c10::Device device);

}  // namespace tessera
