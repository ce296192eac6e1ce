// Reads configurations of DeepSpeed. The stages of ZeRO become sharding strategies.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/config/file_entries.h"
#include "tessera/config/value.h"

namespace tessera::config {
namespace {

class DeepSpeedFile {
 public:
  /// Reads a file of DeepSpeed, or the section deepspeed_config of a file of Accelerate.
  FileEntries read(const YamlValue& root, bool is_section) {
    is_section_ = is_section;
    if (is_section) stage_ = 2;  // the stage unless the section names another
    if (!is_section) result_.add("distributed_type", "FSDP", root.where);
    read_map(root, "");
    finish(root);
    return std::move(result_);
  }

 private:
  using Value = const YamlValue&;
  using Name = const std::string&;
  using Take = void (DeepSpeedFile::*)(Name name, Value value);

  /// DeepSpeed's names that have a counterpart here, in its files or in the section deepspeed_config, each with the function that takes its
  /// value.
  static std::span<const std::pair<std::string_view, Take>> takers() {
    using Self = DeepSpeedFile;
    static constexpr std::pair<std::string_view, Take> kTakers[] = {
        {"zero_optimization", &Self::take_old_zero},
        {"zero_optimization.stage", &Self::take_stage},
        {"zero_stage", &Self::take_stage},
        {"zero_optimization.zero_hpz_partition_size", &Self::take_partition},
        {"zero_optimization.offload_param.device", &Self::take_offload},
        {"zero_optimization.offload_optimizer.device", &Self::take_offload},
        {"offload_param_device", &Self::take_offload},
        {"offload_optimizer_device", &Self::take_offload},
        {"bf16.enabled", &Self::take_precision},
        {"bfloat16.enabled", &Self::take_precision},
        {"fp16.enabled", &Self::take_precision},
        {"train_batch_size", &Self::take_batch_size},
        {"train_micro_batch_size_per_gpu", &Self::take_batch_size},
    };
    return kTakers;
  }

  /// Returns the known name that is most like a misspelt one at the top of the file; empty if none is.
  static std::string name_like(const std::string& name) {
    constexpr size_t kSameLetters = 5;  // DeepSpeed has many more names, some of which resemble these by chance
    std::vector<std::string> known;
    for (const auto* each : {"zero_optimization", "bfloat16", "gradient_accumulation_steps", "gradient_clipping", "train_batch_size",
                             "train_micro_batch_size_per_gpu"})
      if (name.starts_with(std::string_view(each).substr(0, kSameLetters))) known.emplace_back(each);
    return nearest_name(name, known, "zero_");
  }

  /// Reads a map. Names that no function takes become remarks.
  void read_map(Value map, Name above) {
    for (size_t i = 0; i < map.names.size(); i++) {
      const auto& value = map.values[i];
      const auto name = above + printable(map.names[i]);
      // Accelerate's wizard writes such values for settings that are not used.
      const bool is_none = is_section_ && (value.text == "none" || to_bool(value.text) == false || name == "deepspeed_config_file");
      const auto is_inside = [&](const auto& row) { return row.first.starts_with(name + "."); };
      const auto taker = std::ranges::find(takers(), name, [](const auto& row) { return row.first; });
      const auto* key = find_key(name);
      if (name == section_name(Section::Tessera)) {
        throw ConfigError("{}: {} has no place in a file of DeepSpeed; write a YAML file with `tessera config update` and put it there",
                          value.where, name);
      }
      if (value.text == "auto") {
        remark(value, fmt::format("{} auto is left to the program", name));
      } else if (value.shape != YamlValue::Shape::Scalar && std::ranges::any_of(takers(), is_inside)) {
        read_map(value, name + ".");
      } else if (taker != takers().end()) {
        (this->*taker->second)(name, value);
      } else if (key != nullptr && key->is_of_deepspeed) {
        result_.add(name, value.text, value.where);
      } else if (const auto meant = above.empty() ? name_like(name) : ""; !meant.empty()) {
        throw ConfigError("{}: DeepSpeed has no key '{}' (did you mean {}?)", value.where, name, meant);
      } else if (!is_none) {
        remark(value, fmt::format("{} of DeepSpeed has no counterpart here", name));
      }
    }
  }

  void take_batch_size(Name name, Value value) {
    remark(value, fmt::format("{} has no effect: the program chooses the size of its batches", name));
  }

  /// Takes the older form of zero_optimization, which is true or false instead of a section.
  void take_old_zero(Name /*name*/, Value value) { stage_ = to_bool(value.text).value_or(false) ? 1 : 0; }

  void take_stage(Name /*name*/, Value value) {
    const auto stage = to_integer(value.text);
    if (!stage || *stage < 0 || *stage > 3) {
      throw ConfigError("{}: the stage '{}' of ZeRO is not 0, 1, 2 or 3", value.where, printable(value.text));
    }
    stage_ = *stage;
    stage_where_ = value.where;
    if (stage_ == 1) remark(value, "stage 1 of ZeRO becomes SHARD_GRAD_OP, which also shards the gradients");
    if (stage_ == 3) remark(value, "stage 3 of ZeRO becomes FULL_SHARD; fsdp_auto_wrap_policy decides which parameters are gathered together");
  }

  void take_partition(Name /*name*/, Value value) {
    const auto ranks = to_integer(value.text);
    if (!ranks || *ranks < 1)
      throw ConfigError("{}: zero_hpz_partition_size '{}' is not a number of ranks", value.where, printable(value.text));
    is_hybrid_ = *ranks > 1;
    if (is_hybrid_)
      remark(value, fmt::format("zero_hpz_partition_size {} becomes HYBRID_SHARD: parameters are sharded within each machine", *ranks));
  }

  void take_offload(Name name, Value device) {
    if (device.text == "none") return;
    if (device.text != "cpu" && device.text != "nvme") {
      throw ConfigError("{}: {} '{}' is not none, cpu or nvme", device.where, name, printable(device.text));
    }
    if (device.text == "nvme")
      remark(device,
             fmt::format("{} nvme becomes the memory of the host; for ranks on CPUs, tessera_offload disk keeps shards in files", name));
    if (name.find("offload_optimizer") != std::string::npos)
      remark(device, fmt::format("{} moves shards and gradients to the host, too", name));
    if (offload_where_.empty()) offload_where_ = device.where;
  }

  void take_precision(Name name, Value enabled) {
    const auto is_enabled = to_bool(enabled.text);
    if (!is_enabled) throw ConfigError("{}: {} '{}' is not true or false", enabled.where, name, printable(enabled.text));
    if (!*is_enabled) return;
    if (!precision_where_.empty()) throw ConfigError("{}: both fp16 and bf16 are enabled ({})", enabled.where, precision_where_);
    precision_where_ = enabled.where;
    result_.add("mixed_precision", name.starts_with("fp16") ? "fp16" : "bf16", enabled.where);
  }

  void finish(const YamlValue& root) {
    constexpr std::array<std::string_view, 4> kStrategies = {"NO_SHARD", "SHARD_GRAD_OP", "SHARD_GRAD_OP", "FULL_SHARD"};
    if (is_hybrid_ && stage_ != 3) throw ConfigError("{}: zero_hpz_partition_size needs stage 3 of ZeRO", root.where);
    const auto& where = stage_where_.empty() ? root.where : stage_where_;
    result_.add("fsdp_sharding_strategy", is_hybrid_ ? "HYBRID_SHARD" : kStrategies.at(static_cast<size_t>(stage_)), where);
    if (!offload_where_.empty()) result_.add("fsdp_offload_params", "true", offload_where_);
  }

  void remark(Value value, const std::string& text) { result_.remark(value.where, text); }

  FileEntries result_;
  int64_t stage_ = 0;
  bool is_hybrid_ = false, is_section_ = false;
  std::string stage_where_, offload_where_, precision_where_;
};

}  // namespace

bool is_deepspeed(const YamlValue& root) {
  const auto is_section = [&](std::string_view name) {
    const auto* value = root.find(name);
    return value != nullptr && value->shape == YamlValue::Shape::Map;
  };
  return root.find("zero_optimization") != nullptr || root.find("train_batch_size") != nullptr ||
         root.find("train_micro_batch_size_per_gpu") != nullptr || is_section("bf16") || is_section("fp16");
}

FileEntries deepspeed_entries(const YamlValue& root) {
  return DeepSpeedFile().read(root, /*is_section=*/false);
}

FileEntries deepspeed_section_entries(const YamlValue& section) {
  const auto* file = section.find("deepspeed_config_file");
  if (file == nullptr || file->text == "none") return DeepSpeedFile().read(section, /*is_section=*/true);
  const auto root = read_yaml(file->text);
  if (!is_deepspeed(root)) throw ConfigError("{}: {} is not a configuration of DeepSpeed", file->where, file->text);
  return deepspeed_entries(root);
}

}  // namespace tessera::config
