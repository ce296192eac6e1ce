// Moves modules to the XLA device, and ends the steps in which they train.
#pragma once

#include "tessera/base/module_ref.h"

namespace tessera::xla {

/// Moves parameters and buffers to the device, as Module::to does for devices that libtorch knows.
void to_device(ModuleRef module);

/// Ends a step: makes one program of all operations that were traced since the last program, compiles it unless an equal one was compiled
/// before, and starts it.
void step_boundary();

}  // namespace tessera::xla
