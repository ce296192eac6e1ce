// What a configuration says of how a model is sharded.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/config/settings.h"
#include "tessera/shard/activation_options.h"
#include "tessera/shard/options.h"
#include "tessera/shard/wrap.h"

namespace tessera::train {

struct Sharding {
  ShardOptions options;
  std::optional<WrapPolicy> policy = {};               // which modules become units; only the model itself unless given
  std::optional<activation::Options> activation = {};  // checkpointing of the units, if they are checkpointed
};

/// Throws ConfigError, with the key and where its value comes from, for what this device or this world can't do. Collective.
Sharding sharding_of(const config::Settings& settings, const torch::nn::Module& model, const Communicator& world);

/// The names in a value with commas between them.
std::vector<std::string> comma_separated(std::string_view text);

}  // namespace tessera::train
