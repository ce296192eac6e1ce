// Random numbers of the device: a state that programs carry from one to the next.
#pragma once

#include <ATen/core/Generator.h>

#include "tessera/xla/graph/node.h"

namespace tessera::xla {

/// What torch::manual_seed sets. Replicas draw different numbers.
const at::Generator& device_generator();

}  // namespace tessera::xla
