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
  std::optional<WrapPolicy> policy = {};               // which modules become units; unless given, only the model itself does
  std::optional<activation::Options> activation = {};  // activation checkpointing of the units; none unless given
};

/// Returns the options that the settings ask for. Throws ConfigError, which names the key and the origin of its value, for what this device or
/// this world can't do. Collective.
Sharding sharding_of(const config::Settings& settings, const torch::nn::Module& model, const Communicator& world);

/// Lists the keys of a call that the settings give, with the places of their values: "tessera_layout rows (config.yaml:4): ". Empty if they
/// give none.
std::string given_of(const config::Settings& settings, config::Call call);

/// Calls `act`, which makes this call of the library. Adds given_of() to the errors of the call, which name only options of the library.
template <class Act>
auto with_settings(const config::Settings& settings, config::Call call, const Act& act) try {
  return act();
} catch (const Error&) {
  const auto given = given_of(settings, call);
  if (given.empty()) throw;
  std::rethrow_exception(with_context(given));
}

/// Splits a value into the names between its commas.
std::vector<std::string> comma_separated(std::string_view text);

}  // namespace tessera::train
