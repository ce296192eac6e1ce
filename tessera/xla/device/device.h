// Makes the device `xla`.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/xla/device/values.h"
#include "tessera/xla/options.h"
#include "tessera/xla/training.h"

namespace tessera::xla {

/// Makes the device. Call it once in a process, before the first backward pass: only in that pass does libtorch start a thread for each
/// device. Programs call init() instead.
at::Device make_device(const XlaOptions& options = {});

}  // namespace tessera::xla
