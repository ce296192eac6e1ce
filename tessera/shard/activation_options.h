// How activations are checkpointed.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string_view>
#include <vector>

#include "tessera/base/disk_memory.h"
#include "tessera/shard/offload.h"

namespace tessera::activation {

/// Says of an operator, such as "aten::mm", whether its results are kept and it need not run again.
using KeepRule = std::function<bool(std::string_view name)>;

struct Options {
  KeepRule keep = {};
  /// Where the inputs of segments, and the results of operators that are kept, are until backward. Files are written while forward goes on.
  OffloadTo offload = OffloadTo::Nowhere;
  DiskMemoryOptions disk = {};  // with OffloadTo::Disk
  /// Whether the random generators are set back before a segment runs again, so that dropout drops the same values.
  bool preserve_rng_state = true;
};

namespace detail {

using Tensors = std::vector<at::Tensor>;
/// Runs a segment again.
using Again = std::function<void(const Tensors& inputs)>;

}  // namespace detail

}  // namespace tessera::activation
