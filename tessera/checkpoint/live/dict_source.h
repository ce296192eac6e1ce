// State dicts as sources from which a model is loaded.
#pragma once

#include <memory>
#include <string_view>

#include "tessera/checkpoint/live/value_source.h"
#include "tessera/checkpoint/state_dict.h"
#include "tessera/comm/communicator.h"

namespace tessera::checkpoint {

/// The subject of collective operations for state dicts, which errors of communication name.
inline constexpr Subject kStateDict{.unit = "state dict"};

/// Returns the ranks among which the model is sharded, or this process alone. Throws UsageError if the model is not sharded and only rank 0
/// has the dict.
Communicator world_for(const torch::nn::Module& model, const LoadStateDictOptions& options = {});

/// Throws UsageError if this process represents several ranks, each of which would need its own dict, or if the options are for full dicts
/// only.
void expect_own_part(const Communicator& world, const StateDictOptions& options);

/// Returns a copy of a tensor for a dict, on the device that the options ask for.
at::Tensor copied(const at::Tensor& tensor, const StateDictOptions& options);
/// Returns a local tensor as boxes, which are views of its values.
ShardedTensor boxes_of(LocalTensor tensor);

// Make sources of dicts. All dicts are read as boxes; a full tensor is one box. Collective: throw on all ranks if a rank's dict has a
// tensor that is sparse, sharded or without values, and DisagreementError if names, dtypes or shapes differ between the ranks. `failure`
// follows the rank's name in errors.
std::unique_ptr<ValueSource> source_of(const StateDict& dict, const LoadStateDictOptions& options, const Communicator& world,
                                       std::string_view failure);
std::unique_ptr<ValueSource> source_of(const ShardedStateDict& dict, const LoadStateDictOptions& options, const Communicator& world,
                                       std::string_view failure);
std::unique_ptr<ValueSource> source_of(const LocalStateDict& dict, const LoadStateDictOptions& options, const Communicator& world,
                                       std::string_view failure);

}  // namespace tessera::checkpoint
