// State dicts: the values of a model or of an optimizer's state by name, in memory. PyTorch has them as StateDictType FULL (whole tensors),
// SHARDED (a rank's values as boxes of the tensors) and LOCAL (a rank's values as they lie in its shards).
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "tessera/base/module_ref.h"
#include "tessera/base/tensor_slice.h"
#include "tessera/checkpoint/optimizer_ref.h"

namespace tessera::checkpoint {

/// Whole tensors by the names of parameters and buffers.
using StateDict = std::map<std::string, at::Tensor>;
/// The state of an optimizer by the names of parameters, and then by the optimizer's names for its tensors: dict["head.weight"]["exp_avg"].
using OptimStateDict = std::map<std::string, optim::ParameterState>;

struct StateDictOptions {
  bool offload_to_cpu = false;        // puts the tensors on the host; no more than one unit is on the device at a time
  bool rank0_only = false;            // for full dicts: the other ranks get an empty dict, and hold no more than one unit at a time
  bool ignore_frozen_params = false;  // for dicts of models: leaves out parameters that don't train, such as weights with adapters
};

/// Options of loading a state dict. Names are regular expressions that match whole names of parameters and buffers, as in LoadOptions. A
/// dict may always lack optimizer state.
struct LoadStateDictOptions {
  bool broadcast_from_rank0 = false;             // for full dicts: only rank 0 has a dict; the dicts of other ranks are ignored
  std::vector<std::string> may_be_missing = {};  // names that the dict may lack: their values stay
  std::vector<std::string> may_be_unknown = {};  // names that the model may lack: they are not loaded
  bool first_of_tied = false;                    // if a tied parameter's names have different values, takes the value of the first name
};

// All functions here throw in the middle of a forward or backward pass. If a function is collective, an error on one rank is thrown on all
// ranks, and then loading changes nothing. State dicts are copies, which later training does not change. Loading may round values to a
// narrower dtype.

/// Returns copies of all whole parameters and buffers. The names of a tied parameter share one tensor. Buffers are those of rank 0, in
/// their original dtype. Collective.
StateDict full_state_dict(ConstModuleRef model, const StateDictOptions& options = {});
/// Loads each rank's part of the dict. All ranks have the same dict, or rank 0 alone has it and broadcasts its tensors one by one. The dict
/// needs only one of the names of a tied parameter. Collective.
void load_full_state_dict(ModuleRef model, const StateDict& dict, const LoadStateDictOptions& options = {});

/// Returns the whole state of an optimizer: tensors in the shape of the parameter, and step counts. A tied parameter has its first name.
/// The dict lacks settings such as learning rates. Throws UsageError for state in eight bits (AdamW8bit), which has no whole form.
/// Collective.
OptimStateDict full_optim_state_dict(const OptimizerRef& optimizer, ConstModuleRef model, const StateDictOptions& options = {});
/// Loads the state of an optimizer. Parameters that the dict does not name start without state. Collective.
void load_full_optim_state_dict(const OptimizerRef& optimizer, ConstModuleRef model, const OptimStateDict& dict,
                                const LoadStateDictOptions& options = {});

/// The boxes of a tensor that this rank has.
struct ShardedTensor {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape = {};       // of the whole tensor
  std::vector<TensorSlice> slices = {};  // empty if this rank has no values of the tensor
  std::vector<at::Tensor> values = {};   // one tensor for each slice, with the slice's sizes
};
using ShardedStateDict = std::map<std::string, ShardedTensor>;

/// Returns this rank's part of each parameter, and this rank's whole buffers and parameters in no unit. A tied parameter has its first
/// name. Communicates nothing.
ShardedStateDict sharded_state_dict(ConstModuleRef model, const StateDictOptions& options = {});
/// Loads each rank's own dict, which must have the values of that rank's shards, divided into any boxes. Collective.
void load_sharded_state_dict(ModuleRef model, const ShardedStateDict& dict, const LoadStateDictOptions& options = {});

using ShardedOptimStateDict = std::map<std::string, std::map<std::string, ShardedTensor>>;

/// Returns this rank's part of the state of an optimizer, with the names and errors of full_optim_state_dict. Communicates nothing. (The
/// local form is Optimizer::state().)
ShardedOptimStateDict sharded_optim_state_dict(const OptimizerRef& optimizer, ConstModuleRef model, const StateDictOptions& options = {});
/// Loads each rank's own dict, which must have the state of the values that are in that rank's shards. Collective.
void load_sharded_optim_state_dict(const OptimizerRef& optimizer, ConstModuleRef model, const ShardedOptimStateDict& dict,
                                   const LoadStateDictOptions& options = {});

/// The values of this rank's shard as they lie in memory: slice after slice, each in the order of `strides`.
struct LocalTensor {
  std::vector<int64_t> shape = {}, strides = {};  // of the whole tensor
  std::vector<TensorSlice> slices = {};
  at::Tensor values = {};  // flat
};
using LocalStateDict = std::map<std::string, LocalTensor>;

/// As sharded_state_dict, but one flat tensor for each parameter.
LocalStateDict local_state_dict(ConstModuleRef model, const StateDictOptions& options = {});
/// As load_sharded_state_dict: each rank's dict must have the values of that rank's shards. Collective.
void load_local_state_dict(ModuleRef model, const LocalStateDict& dict, const LoadStateDictOptions& options = {});

}  // namespace tessera::checkpoint
