// Looking at a sharded model: its parameters, what they are parts of, what the units cost.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/tensor_slice.h"

namespace torch::nn {
class Module;
}

namespace tessera {

class Unit;

/// This rank's shards: what `module.parameters()` returns, without repetition, and also where the
/// module keeps whole parameters in its table (ParameterList, ParameterDict). Throws UsageError if some of a module's trainable parameters
/// are sharded and others are not: the gradients of those would never be averaged.
std::vector<at::Tensor> parameters(const torch::nn::Module& module);
/// The same with their full names; a tied parameter has its first.
std::vector<std::pair<std::string, at::Tensor>> named_parameters(const torch::nn::Module& module);

/// What an optimizer or a norm is given: throws UsageError if it has shards, and besides them trainable parameters that are in no unit and
/// that no unit of those shards names in ShardOptions::ignored. Without any shard all is well.
void expect_averaged(std::span<const at::Tensor> parameters);

/// What a shard is a part of.
struct ShardInfo {
  std::string unit;
  std::string name;            // full, as named_parameters() of the model has it
  std::vector<int64_t> shape;  // of the whole parameter
  int64_t begin = 0;           // the first of its values in the shard, in the order in which they lie in memory
  int64_t numel = 0;           // of the shard
  /// The same values as slices of the whole parameter, without padding, and of all ranks that the process stands for.
  std::vector<TensorSlice> slices = {};
};
/// Nothing if the tensor is no shard.
std::optional<ShardInfo> shard_info(const at::Tensor& shard);

/// The units of a model, in the order of its modules.
std::vector<std::shared_ptr<Unit>> units(const torch::nn::Module& module);

/// What a model cost this rank since the last reset.
struct ModelCounters {
  uint64_t gathers = 0;
  uint64_t reductions = 0;
  uint64_t gathered_bytes = 0;  // received
  uint64_t peak_unsharded_bytes = 0;
  uint64_t misses = 0;  // uses that the learnt order did not foresee
};
ModelCounters counters(const torch::nn::Module& module);
void reset_counters(const torch::nn::Module& module);

/// Says that this rank leaves out a step that others take with an optimizer of torch::optim over the parameters of the module that have
/// gradients. (Ours have a skip_step() of their own.)
void skip_step(const torch::nn::Module& module);

/// The units, indented by how their modules nest, with their sizes and counters, for people.
std::string describe(const torch::nn::Module& module);

/// Freezes or thaws all parameters of a module from its next forward pass on. Also the way for parameters that are sharded.
enum class Training { Frozen, Trained };
void set_requires_grad(const torch::nn::Module& module, Training training);

}  // namespace tessera
