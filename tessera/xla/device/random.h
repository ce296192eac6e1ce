// Random numbers of the device: a state that programs carry from one to the next.
#pragma once

#include <ATen/core/Generator.h>

#include "tessera/xla/graph/node.h"

namespace tessera::xla {

/// The generator that torch::manual_seed seeds. Replicas draw different numbers.
const at::Generator& device_generator();

/// Uniform in [0, 1), floats of 32 random bits each or doubles of 64; also after rounding to `type`, because they have no more digits.
Value uniform_from(const Value& bits, at::ScalarType type);
/// Uniform in (0, 1): half a step from both ends.
Value inner_from(const Value& bits);
Value normal_from(const Value& bits);

}  // namespace tessera::xla
