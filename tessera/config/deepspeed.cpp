// Configurations of DeepSpeed: the stages of ZeRO as sharding strategies.
#include <fmt/format.h>

#include <array>
#include <functional>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/config/file_entries.h"
#include "tessera/config/value.h"

namespace tessera::config {
namespace {

using DeepSpeedShape = YamlValue::Shape;

class DeepSpeedFile {
 public:
  FileEntries read(const YamlValue& root) {
    result_.add("distributed_type", "FSDP", root.where);
    read_map(root, "", [&](const std::string& name, const YamlValue& value) { return read_top(name, value); });
    finish(root);
    return std::move(result_);
  }

  FileEntries read_section(const YamlValue& section) {
    const auto* file = section.find("deepspeed_config_file");
    if (file != nullptr && file->text != "none") {
      const auto root = read_yaml(file->text);
      if (!is_deepspeed(root)) throw ConfigError(fmt::format("{}: {} is no configuration of DeepSpeed", file->where, file->text));
      return deepspeed_entries(root);
    }
    stage_ = 2;  // unless the section says otherwise
    read_map(section, "", [&](const std::string& name, const YamlValue& value) { return read_flat(name, value); });
    finish(section);
    return std::move(result_);
  }

 private:
  using Reader = std::function<bool(const std::string& name, const YamlValue& value)>;

  /// What the reader knows nothing of becomes a remark.
  void read_map(const YamlValue& map, const std::string& above, const Reader& reader) {
    for (size_t i = 0; i < map.names.size(); i++) {
      const auto& value = map.values[i];
      const auto name = above + printable(map.names[i]);
      if (value.text == "auto") {
        remark(value, fmt::format("{} auto is left to the program", name));
      } else if (!reader(map.names[i], value)) {
        remark(value, fmt::format("{} of DeepSpeed has no counterpart here", name));
      }
    }
  }

  bool read_top(const std::string& name, const YamlValue& value) {
    if (name == "zero_optimization") return read_zero(value);
    if (name == "bf16" || name == "bfloat16") return read_precision("bf16", name, value);
    if (name == "fp16") return read_precision("fp16", name, value);
    if (name == "train_batch_size" || name == "train_micro_batch_size_per_gpu") {
      remark(value, fmt::format("{} has no effect: the program chooses the size of its batches", name));
      return true;
    }
    return read_shared(name, value);
  }

  bool read_shared(const std::string& name, const YamlValue& value) {
    if (!is_of_deepspeed_section(name)) return false;
    result_.add(name, value.text, value.where);
    return true;
  }

  bool read_zero(const YamlValue& zero) {
    if (zero.shape == DeepSpeedShape::Scalar) {  // as it was written once
      stage_ = to_bool(zero.text).value_or(false) ? 1 : 0;
      return true;
    }
    read_map(zero, "zero_optimization.", [&](const std::string& name, const YamlValue& value) {
      if (name == "stage") return read_stage(value);
      if (name == "zero_hpz_partition_size") return read_partition(value);
      if (name == "offload_param" || name == "offload_optimizer") return read_offload(name, value);
      return false;
    });
    return true;
  }

  bool read_flat(const std::string& name, const YamlValue& value) {
    if (name == "zero_stage") return read_stage(value);
    if (name == "offload_param_device" || name == "offload_optimizer_device") {
      offload(name, value);
      return true;
    }
    // Values of Accelerate's own questions that mean the same as leaving them out.
    if (value.text == "none" || to_bool(value.text) == false || name == "deepspeed_config_file") return true;
    return read_shared(name, value);
  }

  bool read_stage(const YamlValue& value) {
    const auto stage = to_integer(value.text);
    if (!stage || *stage < 0 || *stage > 3) {
      throw ConfigError(fmt::format("{}: the stage '{}' of ZeRO is not 0, 1, 2 or 3", value.where, printable(value.text)));
    }
    stage_ = *stage;
    stage_where_ = value.where;
    if (stage_ == 1) remark(value, "stage 1 of ZeRO becomes SHARD_GRAD_OP, which also shards the gradients");
    if (stage_ == 3) remark(value, "stage 3 of ZeRO becomes FULL_SHARD; what is gathered together is for fsdp_auto_wrap_policy to say");
    return true;
  }

  bool read_partition(const YamlValue& value) {
    const auto ranks = to_integer(value.text);
    if (!ranks || *ranks < 1)
      throw ConfigError(fmt::format("{}: zero_hpz_partition_size '{}' is no number of ranks", value.where, printable(value.text)));
    is_hybrid_ = *ranks > 1;
    if (is_hybrid_)
      remark(value, fmt::format("zero_hpz_partition_size {} becomes HYBRID_SHARD: parameters are sharded within each machine", *ranks));
    return true;
  }

  bool read_offload(const std::string& name, const YamlValue& value) {
    read_map(value, "zero_optimization." + name + ".", [&](const std::string& part, const YamlValue& device) {
      if (part == "device") offload(name, device);
      return part == "device";
    });
    return true;
  }

  void offload(const std::string& name, const YamlValue& device) {
    if (device.text == "none") return;
    if (device.text != "cpu" && device.text != "nvme") {
      throw ConfigError(fmt::format("{}: {} '{}' is not none, cpu or nvme", device.where, name, printable(device.text)));
    }
    if (device.text == "nvme")
      remark(device, fmt::format("{} nvme becomes the memory of the host; ShardOptions::offload can use a disk", name));
    if (name.starts_with("offload_optimizer")) remark(device, fmt::format("{} moves shards and gradients to the host, too", name));
    if (offload_where_.empty()) offload_where_ = device.where;
  }

  bool read_precision(std::string_view dtype, const std::string& name, const YamlValue& value) {
    read_map(value, name + ".", [&](const std::string& part, const YamlValue& enabled) {
      if (part != "enabled") return false;
      const auto is_enabled = to_bool(enabled.text);
      if (!is_enabled)
        throw ConfigError(fmt::format("{}: {}.enabled '{}' is not true or false", enabled.where, name, printable(enabled.text)));
      if (!*is_enabled) return true;
      if (!precision_where_.empty())
        throw ConfigError(fmt::format("{}: both fp16 and bf16 are enabled ({})", enabled.where, precision_where_));
      precision_where_ = enabled.where;
      result_.add("mixed_precision", dtype, enabled.where);
      return true;
    });
    return true;
  }

  void finish(const YamlValue& root) {
    constexpr std::array<std::string_view, 4> kStrategies = {"NO_SHARD", "SHARD_GRAD_OP", "SHARD_GRAD_OP", "FULL_SHARD"};
    if (is_hybrid_ && stage_ != 3) throw ConfigError(fmt::format("{}: zero_hpz_partition_size needs stage 3 of ZeRO", root.where));
    const auto& where = stage_where_.empty() ? root.where : stage_where_;
    result_.add("fsdp_sharding_strategy", is_hybrid_ ? "HYBRID_SHARD" : kStrategies.at(static_cast<size_t>(stage_)), where);
    if (!offload_where_.empty()) result_.add("fsdp_offload_params", "true", offload_where_);
  }

  void remark(const YamlValue& value, const std::string& text) { result_.remarks.push_back(fmt::format("{}: {}", value.where, text)); }

  FileEntries result_;
  int64_t stage_ = 0;
  bool is_hybrid_ = false;
  std::string stage_where_, offload_where_, precision_where_;
};

}  // namespace

bool is_deepspeed(const YamlValue& root) {
  const auto is_section = [&](std::string_view name) {
    const auto* value = root.find(name);
    return value != nullptr && value->shape == DeepSpeedShape::Map;
  };
  return root.find("zero_optimization") != nullptr || root.find("train_batch_size") != nullptr ||
         root.find("train_micro_batch_size_per_gpu") != nullptr || is_section("bf16") || is_section("fp16");
}

bool is_of_deepspeed_section(std::string_view key) {
  return key == "gradient_accumulation_steps" || key == "gradient_clipping";
}

FileEntries deepspeed_entries(const YamlValue& root) {
  return DeepSpeedFile().read(root);
}

FileEntries deepspeed_section_entries(const YamlValue& section) {
  return DeepSpeedFile().read_section(section);
}

}  // namespace tessera::config
