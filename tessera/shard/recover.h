// recover: brings the ranks back in step after an exception on some of them.
#pragma once

#include "tessera/base/module_ref.h"

namespace tessera {

/// Call it on every rank after an exception in a forward or backward pass, whether the error was this rank's or another rank's.
/// Abandons the current pass and drops all gradients of the model; all ranks then continue with the next batch. Collective, and the only
/// collective that ranks may enter from different points of their programs. Throws CommError if the ranks have already taken different
/// steps; they then have to load a checkpoint.
void recover(ModuleRef model);

}  // namespace tessera
