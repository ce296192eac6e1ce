// Reads the state of an optimizer for the shards of this process from a checkpoint.
#pragma once

#include <map>
#include <string>

#include "tessera/checkpoint/optimizer_ref.h"
#include "tessera/checkpoint/stored/manifest.h"

namespace tessera {
class Communicator;
}

namespace tessera::checkpoint {

/// By the names of parameters, as OptimizerRef::load_state takes it, under the names of the optimizer that was saved. Of what can be read
/// straight into the optimizer's memory it has only the sizes (device "meta"). Throws UsageError for state that can't be divided as the
/// model is.
std::map<std::string, optim::ParameterState> read_optimizer_state(const Manifest& manifest, const CatalogReader& stored,
                                                                  const torch::nn::Module& model, const Communicator& world);

/// Loads that state, and reads what is left to read.
void load_optimizer_state(const OptimizerRef& optimizer, const std::map<std::string, optim::ParameterState>& state,
                          const Manifest& manifest, const CatalogReader& stored, const torch::nn::Module& model, const Communicator& world);

}  // namespace tessera::checkpoint
