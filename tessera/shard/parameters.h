// Lists the shards of a model, and says which part of which parameter each of them is.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/module_ref.h"
#include "tessera/base/tensor_slice.h"

namespace tessera {

/// The parameters to give to an optimizer: this rank's shards, and parameters that belong to no unit. It differs from `module.parameters()`
/// in two ways: each tensor occurs once, and containers that list unsharded parameters (ParameterList, ParameterDict) contribute their
/// shards. Throws UsageError if some trainable parameters are sharded and other trainable parameters are neither sharded nor ignored,
/// because nothing would average the gradients of these.
std::vector<at::Tensor> parameters(ConstModuleRef module);
/// The same with full names. A tied parameter has its first name.
std::vector<std::pair<std::string, at::Tensor>> named_parameters(ConstModuleRef module);

/// Which part of which parameter a shard is.
struct ShardInfo {
  std::string unit;
  std::string name;                     // the full name, as in named_parameters() of the model
  std::vector<int64_t> shape, strides;  // the shape and strides of the unsharded parameter
  std::vector<ValueRange> ranges;  // the values of the parameter that the shard holds: one range for each rank that this process represents
  std::vector<TensorSlice> slices;  // the same values as boxes of the unsharded parameter
  int64_t begin = 0;                // index in the parameter of this rank's first value; only meaningful if the process represents one rank
  int64_t numel = 0;                // size of the shard, including padding at its end
};
/// Takes a shard or an unsharded parameter; returns nothing for any other tensor.
std::optional<ShardInfo> shard_info(const at::Tensor& shard);

}  // namespace tessera
