// What a checkpoint holds for each parameter beside its values: the state of its optimizer, and its average.
#pragma once

#include <map>
#include <set>
#include <string>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/stored/manifest.h"

namespace tessera::checkpoint {

/// By the names of parameters. The average is under a key of its own.
std::map<std::string, optim::ParameterState> training_state(const Contents& contents);

/// The same from a checkpoint, with the keys of the optimizer that was saved. Of what can be read straight into the memory of the optimizer
/// it has only the sizes (device "meta"). It is without that of the parameters `elsewhere`, which only other ranks have, and of those that
/// may be unknown. Throws UsageError for state that can't be divided as the model is.
std::map<std::string, optim::ParameterState> read_training_state(const Manifest& manifest, const CatalogReader& stored,
                                                                 const torch::nn::Module& model, const std::set<std::string>& elsewhere,
                                                                 const LoadOptions& options,
                                                                 const Communicator& world);

/// Throws UsageError if it does not fit.
void expect_training_state(const Contents& contents, const std::map<std::string, optim::ParameterState>& state, const Manifest& manifest);

/// Loads that state, and reads what is left to read.
void load_training_state(const Contents& contents, const std::map<std::string, optim::ParameterState>& state, const Manifest& manifest,
                         const CatalogReader& stored, const Communicator& world);

}  // namespace tessera::checkpoint
