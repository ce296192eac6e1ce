// What a configuration says of how a model is sharded.
#pragma once

#include <optional>

#include "tessera/comm/communicator.h"
#include "tessera/config/settings.h"
#include "tessera/shard/options.h"
#include "tessera/shard/wrap.h"

namespace tessera::train {

struct Sharding {
  ShardOptions options;
  std::optional<WrapPolicy> policy = {};  // which modules become units; only the model itself unless given
  bool checkpoints_activations = false;   // of the units
};

/// Throws ConfigError, with the key and where its value comes from, for what this device or this world can't do. Collective.
Sharding sharding_of(const config::Settings& settings, const torch::nn::Module& model, const Communicator& world);

}  // namespace tessera::train
