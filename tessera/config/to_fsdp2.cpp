// From the keys of fsdp_version 1 to those of version 2.
#include <fmt/format.h>

#include <array>

#include "tessera/config/settings.h"

namespace tessera::config {
namespace {

// Of version 1 only. A file of version 2 with one of them has no meaning for Accelerate.
constexpr std::array<std::string_view, 5> kRemoved = {"fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_use_orig_params",
                                                      "fsdp_sync_module_states", "fsdp_sharding_strategy"};

bool is_removed(std::string_view key) {
  return std::ranges::find(kRemoved, key) != kRemoved.end() || key == "fsdp_reshard_after_forward";
}

/// Version 2 knows copies of the model only as sizes.
void set_sizes(const Settings& from, Settings& to, const std::string& strategy) {
  if (from.has_sizes()) return;  // copied
  const auto ranks = from.integer("num_processes"), machines = from.integer("num_machines");
  const auto copies = strategy == "NO_SHARD" ? ranks : machines;
  const auto where = fmt::format("strategy {}", strategy);
  if (!from.is_set("num_processes")) {
    to.add_remark(
        fmt::format("{}: in version 2 it needs num_processes, and then parallelism_config_dp_replicate_size and "
                    "parallelism_config_dp_shard_size; without them all ranks share one copy",
                    where));
    return;
  }
  to.set("parallelism_config_dp_replicate_size", fmt::format("{}", copies), Origin::File, where);
  to.set("parallelism_config_dp_shard_size", fmt::format("{}", ranks / copies), Origin::File, where);
}

}  // namespace

Settings to_fsdp2(const Settings& from) {
  if (from.text("fsdp_version") == "2" || from.text("distributed_type") != "FSDP") return from;
  from.expect_consistent();
  Settings to;
  for (const auto& remark : from.remarks()) to.add_remark(remark);
  for (const auto& key : keys()) {
    const auto& [value, origin, where] = from.setting(key.name);
    if (origin == Origin::Default) continue;
    if (!is_removed(key.name)) {
      to.set(key.name, value, origin, where);
    } else if (value != key.otherwise && key.name != "fsdp_sharding_strategy" && key.name != "fsdp_reshard_after_forward") {
      to.add_remark(fmt::format("{}: {} {} has no key in version 2", where, key.name, value));
    }
  }
  const auto strategy = from.sharding_strategy();
  const bool reshards = strategy == "FULL_SHARD" || strategy == "HYBRID_SHARD";
  to.set("fsdp_version", "2", Origin::File, "version 2");
  to.set("fsdp_reshard_after_forward", reshards ? "true" : "false", Origin::File, "version 2");
  if (from.text("fsdp_state_dict_type") == "LOCAL_STATE_DICT") {
    to.set("fsdp_state_dict_type", "SHARDED_STATE_DICT", Origin::Code, "version 2");
    to.add_remark(
        fmt::format("{}: fsdp_state_dict_type LOCAL_STATE_DICT becomes SHARDED_STATE_DICT", from.setting("fsdp_state_dict_type").where));
  }
  if (strategy != "FULL_SHARD" && strategy != "SHARD_GRAD_OP") set_sizes(from, to, strategy);
  return to;
}

}  // namespace tessera::config
