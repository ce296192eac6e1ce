// Hooks and factors with which a program replaces the mean that a reduction of gradients computes.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

#include "tessera/comm/mesh.h"

namespace tessera {

/// The numbers by which a reduction divides gradients: by `pre` before it sends them, in the dtype in which they are sent, and by `post`
/// after the sum.
struct DivideFactors {
  double pre = 1, post = 1;
};

/// The gradients of a unit that a ReductionHook reduces. All tensors are flat.
struct PackedGradient {
  const at::Tensor& whole;  // this rank's gradient of the whole parameters; may be changed
  const at::Tensor& shard;  // to be filled with this rank's part of the mean over all ranks of the mesh
  const Mesh& mesh;
  const std::string& unit;
};
/// Runs in place of the reduction of a unit's gradients, once for each of its flat buffers.
using ReductionHook = std::function<void(const PackedGradient&)>;

}  // namespace tessera
