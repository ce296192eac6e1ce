// Random numbers of the device: a state that programs carry from one to the next.
#pragma once

#include <ATen/core/Generator.h>

#include "tessera/xla/graph/node.h"

namespace tessera::xla {

/// What torch::manual_seed sets. Replicas draw different numbers.
const at::Generator& device_generator();

/// Floats of 32 random bits each, or doubles of 64.
/// In [0, 1), also after they are rounded to `type`: they have no more digits than it has.
Value uniform_from(const Value& bits, at::ScalarType type);
/// In (0, 1): half a step from both ends.
Value inner_from(const Value& bits);
Value normal_from(const Value& bits);

}  // namespace tessera::xla
