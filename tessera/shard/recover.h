// recover: brings the ranks back in step after an exception on some of them.
#pragma once

#include "tessera/base/module_ref.h"

namespace tessera {

/// To be called on every rank after an exception in a forward or backward pass, also on ranks that had no error of their own. Abandons the
/// current pass and drops all gradients of the model; all ranks then continue with the next batch. Collective, and the only collective that
/// ranks may enter from different points of their programs. Throws CommError if the ranks have already taken different steps; they then
/// have to load a checkpoint.
void recover(ModuleRef model);

}  // namespace tessera
