// The device `xla`.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/xla/device/values.h"
#include "tessera/xla/options.h"
#include "tessera/xla/training.h"

namespace tessera::xla {

/// Makes the device, once in a process, before its first backward pass: libtorch counts devices only once. Programs call init().
at::Device make_device(const XlaOptions& options = {});

}  // namespace tessera::xla
