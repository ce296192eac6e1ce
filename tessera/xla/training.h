// Modules on XLA devices, and the steps in which they train.
#pragma once

#include "tessera/base/module_ref.h"

namespace tessera::xla {

/// Moves parameters and buffers to the device, as Module::to does for devices that libtorch knows.
void to_device(ModuleRef module);

/// The end of a step: what has been traced becomes one program, which starts, and the next operator begins the next.
void step_boundary();

}  // namespace tessera::xla
