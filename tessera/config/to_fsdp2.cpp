// Rewrites settings with the keys of fsdp_version 2, or without Tessera's own keys.
#include <fmt/format.h>

#include <algorithm>

#include "tessera/config/settings.h"

namespace tessera::config {
namespace {

/// Copies all settings except those for which `is_left_out` is true. A setting that is left out becomes a remark, with the reason, if its
/// value is not the default.
template <class Predicate>
Settings without(const Settings& from, std::string_view reason, Predicate is_left_out) {
  Settings to;
  for (const auto& remark : from.remarks()) to.add_remark(remark);
  for (const auto& key : keys()) {
    const auto& [value, origin, where] = from.setting(key.name);
    if (origin == Origin::Default) continue;
    if (!is_left_out(key)) {
      to.set(key.name, value, origin, where);
    } else if (value != key.otherwise && key.name != "fsdp_sharding_strategy") {  // version 2 has other keys for it
      to.add_remark(fmt::format("{}: {} {} {}", where, key.name, value, reason));
    }
  }
  return to;
}

/// Sets the sizes of parallelism_config, because version 2 has no strategy by which there are several copies of the model.
void set_sizes(const Settings& from, Settings& to, const std::string& strategy) {
  if (from.has_sizes()) return;  // without() has copied them
  const auto ranks = from.integer("num_processes"), machines = from.integer("num_machines");
  const auto copies = strategy == "NO_SHARD" ? ranks : machines;
  const auto where = fmt::format("strategy {}", strategy);
  if (!from.is_set("num_processes")) {
    to.add_remark(
        fmt::format("{}: version 2 has parallelism_config_dp_replicate_size and parallelism_config_dp_shard_size for it, which depend on "
                    "num_processes; give that first, or else all ranks share one copy",
                    where));
    return;
  }
  to.set("parallelism_config_dp_replicate_size", fmt::format("{}", copies), Origin::File, where);
  to.set("parallelism_config_dp_shard_size", fmt::format("{}", ranks / copies), Origin::File, where);
}

}  // namespace

Settings for_accelerate(const Settings& settings) {
  return without(settings, "is Tessera's own, and left out", [](const Key& key) { return key.section == Section::Tessera; });
}

Settings to_fsdp2(const Settings& given) {
  if (given.text("fsdp_version") == "2" || given.text("distributed_type") != "FSDP") return given;
  given.expect_consistent();
  const bool is_local = given.text("fsdp_state_dict_type") == "LOCAL_STATE_DICT";  // Tessera also saves so without the key
  const auto is_removed = [&](const Key& key) { return key.is_of_version_1 || (is_local && key.name == "fsdp_state_dict_type"); };
  auto to = without(given, "has no key in version 2", is_removed);
  const auto strategy = given.sharding_strategy();
  const bool reshards = strategy == "FULL_SHARD" || strategy == "HYBRID_SHARD";
  to.set("fsdp_version", "2", Origin::Code, "version 2");
  to.set("fsdp_reshard_after_forward", reshards ? "true" : "false", Origin::Code, "version 2");
  if (strategy != "FULL_SHARD" && strategy != "SHARD_GRAD_OP") set_sizes(given, to, strategy);
  const auto own = [&](const Key& key) { return key.section == Section::Tessera && to.is_set(key.name); };
  if (std::ranges::any_of(keys(), own))
    to.add_remark("Accelerate refuses a file with tessera_config; `tessera config update --for-accelerate` leaves that section out");
  return to;
}

}  // namespace tessera::config
