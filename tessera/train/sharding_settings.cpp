#include "tessera/train/sharding_settings.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/shard/activation.h"
#include "tessera/shard/codec.h"
#include "tessera/shard/strategy.h"

namespace tessera::train {
namespace {

using config::Settings;

/// Returns a key with the place of its value: "fsdp_version (config.yaml:7)".
std::string shown(const Settings& settings, std::string_view key) {
  const auto& setting = settings.setting(key);
  return setting.where.empty() ? std::string(key) : fmt::format("{} ({})", key, setting.where);
}

ShardOptions strategy_of(const Settings& settings, const Communicator& world) {
  auto options = sharding_strategy(world, settings.sharding_strategy());
  if (settings.text("distributed_type") != "FSDP") return options;
  settings.expect_sizes_for(world.size());
  const auto copies = settings.integer("parallelism_config_dp_replicate_size"),
             parts = settings.integer("parallelism_config_dp_shard_size");
  if (copies > 1) options.mesh = Mesh(world, {.replicate = static_cast<int>(copies), .shard = static_cast<int>(parts)});
  return options;
}

MixedPrecision precision_of(const Settings& settings) {
  const auto& name = settings.text("mixed_precision");
  if (name == "no") return {};
  const auto dtype = name == "fp16" ? at::kHalf : at::kBFloat16;
  MixedPrecision precision{.param_dtype = dtype, .reduce_dtype = dtype};
  if (settings.text("fsdp_version") == "1") precision.buffer_dtype = dtype;
  return precision;
}

std::optional<WrapPolicy> policy_of(const Settings& settings) {
  const auto& name = settings.text("fsdp_auto_wrap_policy");
  if (name == "SIZE_BASED_WRAP") return wrap_by_size({.min_params = settings.integer("fsdp_min_num_params")});
  if (name != "TRANSFORMER_BASED_WRAP") return {};
  const auto classes = comma_separated(settings.text("fsdp_transformer_layer_cls_to_wrap"));
  if (classes.empty()) {
    throw ConfigError(
        "{} is TRANSFORMER_BASED_WRAP, but fsdp_transformer_layer_cls_to_wrap names no class; give it the classes of the layers, "
        "such as BertLayer, or take NO_WRAP",
        shown(settings, "fsdp_auto_wrap_policy"));
  }
  return wrap_classes(classes);
}

/// Returns the enumerator of the chosen value. The enumerators have the order of the key's choices.
template <class T>
T chosen(const Settings& settings, std::string_view key) {
  const auto& choices = config::find_key(key)->choices;
  return static_cast<T>(std::ranges::find(choices, settings.text(key)) - choices.begin());
}

/// Returns `to`. Throws ConfigError if ranks on this device can't offload to it.
OffloadTo expect_offload(OffloadTo to, const Settings& settings, std::string_view key, const Communicator& world) {
  const auto device = world.traits().device;
  const auto refuse = [&](std::string_view why) { throw ConfigError("{} is {}, but {}", shown(settings, key), settings.text(key), why); };
  if (to == OffloadTo::Host && device.is_cpu())
    refuse("parameters are in the memory of the host already; leave it out, or keep them in files by tessera_offload disk");
  if (to == OffloadTo::Disk && !device.is_cpu())
    refuse(fmt::format("parameters are on {}; only tensors in host memory can be kept in files", device.str()));
  return to;
}

OffloadTo offload_of(const Settings& settings, std::string_view key, const Communicator& world) {
  return expect_offload(chosen<OffloadTo>(settings, key), settings, key, world);
}

/// Applies the keys of tessera_config.
void apply_own_keys(const Settings& settings, const Communicator& world, ShardOptions& options) {
  options.residence = chosen<Residence>(settings, "tessera_residence");
  options.layout = chosen<Layout>(settings, "tessera_layout");
  options.schedule.unused_parameters = chosen<UnusedParameters>(settings, "tessera_unused_parameters");
  if (settings.text("tessera_codec") == "bf16") options.codec = cast_codec(at::kBFloat16);
  if (const auto& dtype = settings.text("tessera_grad_dtype"); dtype != "no")
    options.mixed_precision.grad_dtype = dtype == "fp64" ? at::kDouble : at::kFloat;
  if (const auto ranks = settings.integer("tessera_reshard_ranks"); ranks > 0) options.reshard_after_forward = static_cast<int>(ranks);
  if (const auto depth = settings.integer("tessera_prefetch_depth"); depth > 0) options.schedule.prefetch_depth = static_cast<int>(depth);
  options.schedule.max_live_units = static_cast<int>(settings.integer("tessera_max_live_units"));
  options.schedule.limit_all_gathers = settings.is_true("tessera_limit_all_gathers");
  options.offload.parameters = offload_of(settings, "tessera_offload", world);
  if (options.offload.parameters == OffloadTo::Disk) options.offload.gradients = OffloadTo::Disk;
  options.offload.disk.folder = settings.text("tessera_offload_folder");
}

std::optional<activation::Options> activation_of(const Settings& settings, const Communicator& world) {
  if (!settings.is_true("fsdp_activation_checkpointing")) return {};
  activation::Options options{.offload = offload_of(settings, "tessera_activation_offload", world),
                              .disk = {.folder = settings.text("tessera_offload_folder")}};
  const auto kept = comma_separated(settings.text("tessera_activation_keep"));
  try {
    if (!kept.empty()) options.keep = activation::operators(kept);
  } catch (const UsageError& error) {
    throw ConfigError("{}: {}", shown(settings, "tessera_activation_keep"), error.what());
  }
  return options;
}

}  // namespace

std::vector<std::string> comma_separated(std::string_view text) {
  std::vector<std::string> names;
  for (size_t begin = 0; begin <= text.size();) {
    const auto end = std::min(text.find(',', begin), text.size());
    const auto first = text.find_first_not_of(' ', begin);
    if (first < end) names.emplace_back(text.substr(first, text.find_last_not_of(' ', end - 1) + 1 - first));
    begin = end + 1;
  }
  return names;
}

std::string given_of(const Settings& settings, config::Call call) {
  std::string given;
  for (const auto& key : config::keys()) {
    if (key.call != call || settings.is_usual(key.name)) continue;
    given += fmt::format("{}{} {} ({})", given.empty() ? "" : ", ", key.name, settings.text(key.name), settings.setting(key.name).where);
  }
  return given.empty() ? "" : given + ": ";
}

Sharding sharding_of(const Settings& settings, const torch::nn::Module& model, const Communicator& world) {
  Sharding result{.options = strategy_of(settings, world)};
  auto& options = result.options;
  options.mixed_precision = precision_of(settings);
  apply_own_keys(settings, world, options);
  if (settings.text("distributed_type") != "FSDP") {
    options.start = Start::FromRank0;  // as PyTorch's data parallelism does
    return result;
  }
  if (settings.is_true("fsdp_offload_params"))
    options.offload.parameters = expect_offload(OffloadTo::Host, settings, "fsdp_offload_params", world);
  options.start = settings.is_true("fsdp_sync_module_states") ? Start::FromRank0 : Start::Equal;
  options.listing = settings.is_true("fsdp_use_orig_params") ? Listing::ByName : Listing::Flat;
  options.schedule.backward_prefetch = chosen<BackwardPrefetch>(settings, "fsdp_backward_prefetch");
  options.schedule.forward_prefetch = settings.is_true("fsdp_forward_prefetch");
  if (const auto& pattern = settings.text("fsdp_ignored_modules"); !pattern.empty()) {
    options.ignored = parameters_of_modules(model, pattern);
    const auto buffers = buffers_of_modules(model, pattern);
    options.ignored.insert(options.ignored.end(), buffers.begin(), buffers.end());
  }
  result.policy = policy_of(settings);
  result.activation = activation_of(settings, world);
  return result;
}

}  // namespace tessera::train
