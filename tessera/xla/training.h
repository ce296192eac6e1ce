// Modules on XLA devices, and the steps in which they train.
#pragma once

#include "tessera/base/module_ref.h"

namespace tessera::xla {

/// Moves parameters and buffers to the device, as Module::to does for devices that libtorch knows.
void to_device(ModuleRef module);

/// Ends a step: compiles all that has been traced as one program, unless it is known, and starts it.
void step_boundary();

}  // namespace tessera::xla
