// State dicts as sources from which a model is loaded.
#pragma once

#include <memory>
#include <string_view>

#include "tessera/checkpoint/live/value_source.h"
#include "tessera/checkpoint/state_dict.h"
#include "tessera/comm/communicator.h"

namespace tessera::checkpoint {

/// What the operations of state dicts are about, for errors of communication.
inline constexpr Subject kStateDict{.unit = "state dict"};

/// The ranks among which the model is sharded, or this process alone. Throws UsageError if the model is not sharded and rank 0 alone has
/// the dict.
Communicator world_for(const torch::nn::Module& model, const LoadStateDictOptions& options = {});

/// Throws UsageError if this process stands for several ranks, each of which would have a dict of its own, or if the options are those of
/// full dicts.
void expect_own_part(const Communicator& world, const StateDictOptions& options);

/// A copy for a dict.
at::Tensor copied(const at::Tensor& tensor, const StateDictOptions& options);
/// A local tensor as the boxes that its values are.
ShardedTensor boxes_of(LocalTensor tensor);

// All dicts are read as boxes: that of a full tensor is all of it. Collective: throws on all ranks if a rank's dict has something that is
// no ordinary tensor, or DisagreementError if names, dtypes or shapes differ between the ranks. `failure` follows the rank's name in
// errors.
std::unique_ptr<ValueSource> source_of(const StateDict& dict, const LoadStateDictOptions& options, const Communicator& world,
                                       std::string_view failure);
std::unique_ptr<ValueSource> source_of(const ShardedStateDict& dict, const LoadStateDictOptions& options, const Communicator& world,
                                       std::string_view failure);
std::unique_ptr<ValueSource> source_of(const LocalStateDict& dict, const LoadStateDictOptions& options, const Communicator& world,
                                       std::string_view failure);

}  // namespace tessera::checkpoint
