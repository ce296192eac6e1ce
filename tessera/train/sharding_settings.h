// Translates a configuration into options for sharding a model.
#pragma once

#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/error.h"
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

/// Lists the keys of a call that were given, with where: "tessera_layout rows (config.yaml:4): ". Empty if none was.
std::string given_of(const config::Settings& settings, config::Call call);

/// Calls `act`, which makes this call. Its errors, which know only options of the library, name the keys that were given.
template <class Act>
auto with_settings(const config::Settings& settings, config::Call call, const Act& act) try {
  return act();
} catch (const Error&) {
  const auto given = given_of(settings, call);
  if (given.empty()) throw;
  std::rethrow_exception(with_context(given));
}

/// The names in a value with commas between them.
std::vector<std::string> comma_separated(std::string_view text);

}  // namespace tessera::train
