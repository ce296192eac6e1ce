// Options of activation checkpointing.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string_view>
#include <vector>

#include "tessera/base/disk_memory.h"
#include "tessera/shard/offload.h"

namespace tessera::activation {

/// Returns whether a segment keeps the results of this operator, such as "aten::mm", so that backward does not run the operator again.
using KeepRule = std::function<bool(std::string_view name)>;

struct Options {
  KeepRule keep = {};
  /// Where segments store their inputs and the kept results of operators until backward. Files are written while forward continues.
  OffloadTo offload = OffloadTo::Nowhere;
  DiskMemoryOptions disk = {};  // used with OffloadTo::Disk
  /// Whether the state of the random generators is restored before a segment runs again, so that dropout drops the same values.
  bool preserve_rng_state = true;
};

namespace detail {

using Tensors = std::vector<at::Tensor>;
/// Runs a segment again.
using Again = std::function<void(const Tensors& inputs)>;

}  // namespace detail

}  // namespace tessera::activation
