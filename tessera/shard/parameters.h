// The sharded parameters of a model, and what each of them is a part of.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/tensor_slice.h"

namespace torch::nn {
class Module;
}

namespace tessera {

/// This rank's shards: what `module.parameters()` returns, without repetition, and also where the module keeps unsharded parameters in its
/// table (ParameterList, ParameterDict). Throws UsageError if some of a module's trainable parameters are sharded and others are not: the
/// gradients of those would never be averaged.
std::vector<at::Tensor> parameters(const torch::nn::Module& module);
/// The same with their full names; a tied parameter has its first.
std::vector<std::pair<std::string, at::Tensor>> named_parameters(const torch::nn::Module& module);

/// What an optimizer or a norm is given: throws UsageError if it has shards, and besides them trainable parameters that are in no unit and
/// that no unit of those shards names in ShardOptions::ignored. Without any shard all is well.
void expect_averaged(std::span<const at::Tensor> parameters);

/// Values of a parameter in the order in which they lie in memory.
struct ValueRange {
  int64_t begin = 0, numel = 0;
};

/// What a shard is a part of.
struct ShardInfo {
  std::string unit;
  std::string name;                     // full, as named_parameters() of the model has it
  std::vector<int64_t> shape, strides;  // of the unsharded parameter
  std::vector<ValueRange> ranges;       // its values in the shard, of each rank that the process stands for: nearly always one
  std::vector<TensorSlice> slices;      // the same values as boxes of the unsharded parameter
  int64_t begin = 0;                    // of this rank's values, where the process stands for one
  int64_t numel = 0;                    // of the shard, with the padding that may end it
};
/// Nothing if the tensor is no shard.
std::optional<ShardInfo> shard_info(const at::Tensor& shard);

}  // namespace tessera
