// What settings mean together, and which contradict each other.
#include <fmt/format.h>

#include <algorithm>
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

const std::string& where_sizes_are(const Settings& settings) {
  const bool has_copies = settings.integer("parallelism_config_dp_replicate_size") > 1;
  return settings.setting(has_copies ? "parallelism_config_dp_replicate_size" : "parallelism_config_dp_shard_size").where;
}

/// Sizes divide ranks into copies of a sharded model, so what shards nothing, or says itself how ranks are divided, contradicts them.
void expect_sizes_of_strategy(const Settings& settings, const std::string& strategy) {
  if (!settings.has_sizes()) return;
  const bool has_copies = settings.integer("parallelism_config_dp_replicate_size") > 1;
  const auto refuse = [&](std::string_view key) {
    throw ConfigError(fmt::format("{}: the sizes of parallelism_config contradict {} {} ({}); leave one of them out",
                                  where_sizes_are(settings), key, settings.text(key), settings.setting(key).where));
  };
  if (settings.text("distributed_type") != "FSDP") refuse("distributed_type");
  const bool is_one_copy = strategy.starts_with("HYBRID") && !has_copies;
  const bool shards_nothing = strategy == "NO_SHARD" && settings.integer("parallelism_config_dp_shard_size") > 1;
  if (!is_one_copy && !shards_nothing) return;
  refuse(settings.text("fsdp_reshard_after_forward") == strategy ? "fsdp_reshard_after_forward" : "fsdp_sharding_strategy");
}

void expect_one_strategy(const Settings& settings) {
  const auto& strategy = settings.setting("fsdp_sharding_strategy");
  const auto& reshard = settings.setting("fsdp_reshard_after_forward");
  if (strategy.origin != reshard.origin || strategy.origin == Origin::Default || strategy.origin == Origin::Environment) return;
  const bool is_bool = reshard.value == "true" || reshard.value == "false";
  const bool agree = is_bool ? keeps_unsharded(strategy.value) == (reshard.value == "false") : strategy.value == reshard.value;
  if (agree) return;
  throw ConfigError(fmt::format("{}: fsdp_reshard_after_forward {} contradicts fsdp_sharding_strategy {} ({}); leave one of them out",
                                reshard.where, reshard.value, strategy.value, strategy.where));
}

void expect_gpu_ids(const Setting& ids) {
  const auto is_fine = [](char letter) { return (letter >= '0' && letter <= '9') || letter == ','; };
  if (ids.value == "all" || (std::ranges::all_of(ids.value, is_fine) && to_integer(ids.value.substr(0, 1)))) return;
  throw ConfigError(
      fmt::format("{}: gpu_ids '{}' is neither all nor numbers with commas between them, such as 0,1", ids.where, printable(ids.value)));
}

void expect_pattern(const Setting& pattern) {
  if (pattern.value.empty()) return;
  try {
    const std::regex compiled(pattern.value);
  } catch (const std::regex_error& error) {
    throw ConfigError(
        fmt::format("{}: fsdp_ignored_modules '{}' is no regular expression: {}", pattern.where, printable(pattern.value), error.what()));
  }
}

void expect_machines_that_fit(const Settings& settings) {
  const auto machines = settings.integer("num_machines"), machine = settings.integer("machine_rank"),
             ranks = settings.integer("num_processes");
  if (machine >= machines) {
    throw ConfigError(fmt::format("{}: machine_rank {} is not below num_machines {}; machines are counted from 0",
                                  settings.setting("machine_rank").where, machine, machines));
  }
  if (!settings.is_set("num_processes")) return;
  const auto& where = settings.setting("num_processes").where;
  if (ranks % machines != 0) {
    throw ConfigError(fmt::format("{}: num_processes {} can't be divided among num_machines {}; it is the number of ranks on all machines",
                                  where, ranks, machines));
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
  // Accelerate's launch gives ranks both keys, one of them with a default that nobody wrote: FULL_SHARD beside another name, or true
  // beside a strategy of version 1.
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
  throw ConfigError(
      fmt::format("{}: parallelism_config_dp_replicate_size {} times parallelism_config_dp_shard_size {} is {}, but there are {} ranks",
                  where_sizes_are(*this), copies, shards, copies * shards, ranks));
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
  if (is_true("fsdp_cpu_ram_efficient_loading") && !is_true("fsdp_sync_module_states")) {
    throw ConfigError(
        fmt::format("{}: fsdp_cpu_ram_efficient_loading true needs fsdp_sync_module_states true ({}): only rank 0 loads values, and the "
                    "others get theirs from it",
                    setting("fsdp_cpu_ram_efficient_loading").where, setting("fsdp_sync_module_states").where));
  }
  if (!text("fsdp_transformer_layer_cls_to_wrap").empty() && text("fsdp_auto_wrap_policy") != "TRANSFORMER_BASED_WRAP") {
    throw ConfigError(fmt::format("{}: fsdp_transformer_layer_cls_to_wrap needs fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP; it is {}",
                                  setting("fsdp_transformer_layer_cls_to_wrap").where, text("fsdp_auto_wrap_policy")));
  }
  expect_pattern(setting("fsdp_ignored_modules"));
  if (text("fsdp_version") == "2" && text("fsdp_state_dict_type") == "LOCAL_STATE_DICT") {
    throw ConfigError(fmt::format("{}: fsdp_state_dict_type LOCAL_STATE_DICT is of fsdp_version 1; use SHARDED_STATE_DICT",
                                  setting("fsdp_state_dict_type").where));
  }
  expect_gpu_ids(setting("gpu_ids"));
  if (is_true("use_cpu") && text("distributed_type") == "MULTI_GPU") {
    throw ConfigError(fmt::format("{}: use_cpu true contradicts distributed_type MULTI_GPU ({})", setting("use_cpu").where,
                                  setting("distributed_type").where));
  }
}

}  // namespace tessera::config
