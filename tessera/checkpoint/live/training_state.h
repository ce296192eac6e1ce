// The state of each parameter that a checkpoint holds beside its values: that of the optimizer, and the average.
#pragma once

#include <map>
#include <set>
#include <string>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/stored/manifest.h"

namespace tessera::checkpoint {

/// Returns the state by names of parameters. The average has a key of its own.
std::map<std::string, optim::ParameterState> training_state(const Contents& contents);

/// Reads the state from a checkpoint, with the keys of the optimizer that was saved. A tensor that can be read straight into the
/// optimizer's memory has only sizes here (device "meta"). Leaves out parameters `elsewhere`, which only other ranks have, and those that
/// may be unknown. Throws UsageError for state that can't be divided as the model is.
std::map<std::string, optim::ParameterState> read_training_state(const Manifest& manifest, const CatalogReader& stored,
                                                                 const torch::nn::Module& model, const std::set<std::string>& elsewhere,
                                                                 const LoadOptions& options,
                                                                 const Communicator& world);

/// Throws UsageError if the state does not fit the optimizer and the average.
void expect_training_state(const Contents& contents, const std::map<std::string, optim::ParameterState>& state, const Manifest& manifest);

/// Loads that state, and reads the tensors that have only sizes.
void load_training_state(const Contents& contents, const std::map<std::string, optim::ParameterState>& state, const Manifest& manifest,
                         const CatalogReader& stored, const Communicator& world);

}  // namespace tessera::checkpoint
