// Random numbers of the device. Each program takes the generator's state and gives the next one as a result.
#pragma once

#include <ATen/core/Generator.h>

#include "tessera/xla/graph/node.h"

namespace tessera::xla {

/// The generator that torch::manual_seed seeds. Replicas draw different numbers.
const at::Generator& device_generator();

/// Returns uniform numbers in [0, 1): floats from 32 random bits each, or doubles from 64. They have no more digits than `type` has, so they
/// stay below 1 when they are converted to `type`.
Value uniform_from(const Value& bits, at::ScalarType type);
/// Returns uniform numbers in (0, 1), which stay half a step away from both ends.
Value inner_from(const Value& bits);
Value normal_from(const Value& bits);

}  // namespace tessera::xla
