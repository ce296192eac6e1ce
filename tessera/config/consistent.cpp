// Derives the sharding strategy from several settings, and refuses settings that contradict each other.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <regex>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/config/settings.h"
#include "tessera/config/value.h"

namespace tessera::config {
namespace {

bool keeps_unsharded(const std::string& strategy) {
  return strategy == "SHARD_GRAD_OP" || strategy == "HYBRID_SHARD_ZERO2" || strategy == "NO_SHARD";
}

std::string with_resharding(const std::string& strategy, bool reshards) {
  const bool is_hybrid = strategy.starts_with("HYBRID");
  if (reshards) return is_hybrid ? "HYBRID_SHARD" : "FULL_SHARD";
  if (strategy == "NO_SHARD") return strategy;
  return is_hybrid ? "HYBRID_SHARD_ZERO2" : "SHARD_GRAD_OP";
}

/// Returns where a setting comes from, such as "config.yaml:7", or "the default".
std::string_view place_of(const Settings& settings, std::string_view key) {
  return settings.is_set(key) ? std::string_view(settings.setting(key).where) : "the default";
}

std::string valued(const Settings& settings, std::string_view key) {
  return fmt::format("{} {}", key, printable(settings.text(key)));
}

[[noreturn]] void contradict(const Settings& settings, std::string_view key, std::string_view other) {
  throw ConfigError("{}: {} contradicts {} ({}); leave one of them out", place_of(settings, key), valued(settings, key),
                    valued(settings, other), place_of(settings, other));
}

void expect_need(const Settings& settings, std::string_view key, std::string_view other, std::string_view value) {
  if (settings.is_usual(key) || settings.text(other) == value) return;
  throw ConfigError("{}: {} needs {} {}; it is {} ({})", place_of(settings, key), valued(settings, key), other, value, settings.text(other),
                    place_of(settings, other));
}

/// Throws if settings do not meet the needs in the rows of keys, or have values that contradict each other there.
void expect_rows(const Settings& settings) {
  const auto holds = [&](std::string_view key, std::string_view value) {
    return settings.is_set(key) && (value.empty() ? !settings.is_usual(key) : settings.text(key) == value);
  };
  for (const auto& key : keys()) {
    for (const auto& [other, value] : key.needs) expect_need(settings, key.name, other, value);
    for (const auto& [value, other, other_value] : key.contradicts) {
      if (holds(key.name, value) && holds(other, other_value)) contradict(settings, key.name, other);
    }
  }
}

std::string_view key_of_sizes(const Settings& settings) {
  const bool has_copies = settings.integer("parallelism_config_dp_replicate_size") > 1;
  return has_copies ? "parallelism_config_dp_replicate_size" : "parallelism_config_dp_shard_size";
}

/// Returns the key that decides the strategy.
std::string_view key_of_strategy(const Settings& settings, const std::string& strategy) {
  if (settings.text("distributed_type") != "FSDP") return "distributed_type";
  return settings.text("fsdp_reshard_after_forward") == strategy ? "fsdp_reshard_after_forward" : "fsdp_sharding_strategy";
}

/// Throws if the sizes of parallelism_config contradict the strategy: a dp_shard_size above 1 contradicts NO_SHARD, and a single copy of
/// the model contradicts a HYBRID strategy.
void expect_sizes_of_strategy(const Settings& settings, const std::string& strategy) {
  if (!settings.has_sizes()) return;
  const bool has_copies = settings.integer("parallelism_config_dp_replicate_size") > 1;
  const bool is_one_copy = strategy.starts_with("HYBRID") && !has_copies;
  const bool shards_nothing = strategy == "NO_SHARD" && settings.integer("parallelism_config_dp_shard_size") > 1;
  if (settings.text("distributed_type") == "FSDP" && !is_one_copy && !shards_nothing) return;
  contradict(settings, key_of_sizes(settings), key_of_strategy(settings, strategy));
}

void expect_one_strategy(const Settings& settings) {
  const auto& strategy = settings.setting("fsdp_sharding_strategy");
  const auto& reshard = settings.setting("fsdp_reshard_after_forward");
  if (strategy.origin != reshard.origin || strategy.origin == Origin::Default || strategy.origin == Origin::Environment) return;
  const bool is_bool = reshard.value == "true" || reshard.value == "false";
  const bool agree = is_bool ? keeps_unsharded(strategy.value) == (reshard.value == "false") : strategy.value == reshard.value;
  if (!agree) contradict(settings, "fsdp_reshard_after_forward", "fsdp_sharding_strategy");
}

/// Throws if a value of one of Tessera's own keys contradicts several other keys together.
void expect_own_keys(const Settings& settings) {
  const auto strategy = settings.sharding_strategy();
  if (settings.integer("tessera_reshard_ranks") > 0 && keeps_unsharded(strategy))
    contradict(settings, "tessera_reshard_ranks", key_of_strategy(settings, strategy));
  if (settings.integer("tessera_prefetch_depth") > 0 && settings.integer("tessera_max_live_units") == 1 &&
      settings.is_true("tessera_limit_all_gathers"))
    contradict(settings, "tessera_prefetch_depth", "tessera_max_live_units");
  const auto& transport = settings.text("tessera_transport");
  if (settings.text("distributed_type") == "XLA" && transport != "auto" && transport != "xla")
    contradict(settings, "tessera_transport", "distributed_type");
  if (settings.text("tessera_activation_offload") != "disk") expect_need(settings, "tessera_offload_folder", "tessera_offload", "disk");
  const auto &format = settings.setting("tessera_checkpoint_format"), &layout = settings.setting("fsdp_state_dict_type");
  const bool is_of_accelerate = layout.value != "LOCAL_STATE_DICT";
  if (format.origin != Origin::Default && format.origin == layout.origin && is_of_accelerate != (format.value == "accelerate"))
    contradict(settings, "tessera_checkpoint_format", "fsdp_state_dict_type");
}

void expect_gpu_ids(const Setting& ids) {
  const auto is_fine = [](char letter) { return (letter >= '0' && letter <= '9') || letter == ','; };
  if (ids.value == "all" || (std::ranges::all_of(ids.value, is_fine) && to_integer(ids.value.substr(0, 1)))) return;
  throw ConfigError("{}: gpu_ids '{}' is neither all nor numbers with commas between them, such as 0,1", ids.where, printable(ids.value));
}

void expect_classes(const Setting& classes) {
  for (size_t begin = 0; begin < classes.value.size(); begin = std::min(classes.value.find(',', begin), classes.value.size() - 1) + 1) {
    const auto first =
        static_cast<unsigned char>(classes.value[std::min(classes.value.find_first_not_of(' ', begin), classes.value.size() - 1)]);
    if (std::isalpha(first) != 0 || first == '_' || first >= 0x80) continue;
    throw ConfigError(
        "{}: fsdp_transformer_layer_cls_to_wrap '{}' is not the names of classes with commas between, such as "
        "BertLayer,T5Block",
        classes.where, printable(classes.value));
  }
}

void expect_pattern(const Setting& pattern) {
  if (pattern.value.empty()) return;
  try {
    const std::regex compiled(pattern.value);
  } catch (const std::regex_error& error) {
    throw ConfigError("{}: fsdp_ignored_modules '{}' is not a regular expression: {}", pattern.where, printable(pattern.value), error.what());
  }
}

void expect_machines_that_fit(const Settings& settings) {
  const auto machines = settings.integer("num_machines"), machine = settings.integer("machine_rank"),
             ranks = settings.integer("num_processes");
  if (machine >= machines) {
    throw ConfigError("{}: machine_rank {} is not below num_machines {}; machines are counted from 0",
                      settings.setting("machine_rank").where, machine, machines);
  }
  if (!settings.is_set("num_processes")) return;
  const auto& where = settings.setting("num_processes").where;
  if (ranks % machines != 0) {
    throw ConfigError("{}: num_processes {} can't be divided among num_machines {}; it is the number of ranks on all machines", where,
                      ranks, machines);
  }
  settings.expect_sizes_for(ranks);
}

}  // namespace

bool Settings::has_sizes() const {
  return integer("parallelism_config_dp_replicate_size") * integer("parallelism_config_dp_shard_size") > 1;
}

std::string Settings::keyed_strategy() const {
  const auto& [strategy, strategy_origin, strategy_where] = setting("fsdp_sharding_strategy");
  const auto& [reshard, reshard_origin, reshard_where] = setting("fsdp_reshard_after_forward");
  if (reshard_origin == Origin::Default || strategy_origin > reshard_origin) return strategy;
  const bool is_bool = reshard == "true" || reshard == "false";
  // Accelerate's launch passes both keys to ranks, although the user wrote only one of them. The other key then has a default: FULL_SHARD
  // while fsdp_reshard_after_forward names another strategy, or `true` while fsdp_sharding_strategy names any strategy.
  if (strategy_origin == reshard_origin && text("fsdp_version") == "1" && (is_bool || strategy != "FULL_SHARD")) return strategy;
  return is_bool ? with_resharding(strategy, reshard == "true") : reshard;
}

Settings Settings::settled() const {
  auto result = *this;
  if (!is_set("fsdp_sharding_strategy") || !is_set("fsdp_reshard_after_forward")) return result;
  const auto strategy = keyed_strategy();
  const std::string reshards = keeps_unsharded(strategy) ? "false" : "true";
  result.values_.find("fsdp_sharding_strategy")->second.value = strategy;
  result.values_.find("fsdp_reshard_after_forward")->second.value = text("fsdp_version") == "1" ? strategy : reshards;
  return result;
}

void Settings::expect_sizes_for(int64_t ranks) const {
  const auto copies = integer("parallelism_config_dp_replicate_size"), shards = integer("parallelism_config_dp_shard_size");
  if (!has_sizes() || copies * shards == ranks) return;
  throw ConfigError("{}: parallelism_config_dp_replicate_size {} times parallelism_config_dp_shard_size {} is {}, but there are {} ranks",
                    place_of(*this, key_of_sizes(*this)), copies, shards, copies * shards, ranks);
}

std::string Settings::sharding_strategy() const {
  if (text("distributed_type") != "FSDP") return "NO_SHARD";
  const auto strategy = keyed_strategy();
  if (integer("parallelism_config_dp_replicate_size") == 1) return strategy;
  if (integer("parallelism_config_dp_shard_size") == 1) return "NO_SHARD";
  return keeps_unsharded(strategy) ? "HYBRID_SHARD_ZERO2" : "HYBRID_SHARD";
}

void Settings::expect_consistent() const {
  expect_one_strategy(*this);
  expect_machines_that_fit(*this);
  expect_sizes_of_strategy(*this, keyed_strategy());
  expect_rows(*this);
  expect_classes(setting("fsdp_transformer_layer_cls_to_wrap"));
  expect_pattern(setting("fsdp_ignored_modules"));
  if (text("fsdp_version") == "2" && text("fsdp_state_dict_type") == "LOCAL_STATE_DICT") {
    throw ConfigError("{}: fsdp_state_dict_type LOCAL_STATE_DICT is of fsdp_version 1; leave it out",
                      setting("fsdp_state_dict_type").where);
  }
  expect_gpu_ids(setting("gpu_ids"));
  expect_own_keys(*this);
}

bool Settings::saves_for_accelerate() const {
  const auto &format = setting("tessera_checkpoint_format"), &layout = setting("fsdp_state_dict_type");
  if (format.origin != Origin::Default && format.origin >= layout.origin) return format.value == "accelerate";
  return layout.origin != Origin::Default && layout.value != "LOCAL_STATE_DICT";
}

}  // namespace tessera::config
