// Settings: the values of all keys, each with where it comes from.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/config/keys.h"

namespace tessera::config {

/// Where a value comes from. A later origin wins over an earlier one.
enum class Origin { Default, File, Environment, Flag, Code };

struct Setting {
  std::string value;
  Origin origin = Origin::Default;
  std::string where = {};  // "config.yaml:7", "FSDP_VERSION", "--fsdp-version"
};

class Settings {
 public:
  /// Sets all keys to their defaults.
  Settings();

  /// Reads a YAML or JSON file of Accelerate, or a JSON file of DeepSpeed. Throws ConfigError, with file and line, for a key that is
  /// unknown and for a value that is invalid or refused.
  void read_file(const std::filesystem::path& file);
  /// Reads the variables of all keys. A value that launch has passed on keeps the origin that it had in launch. Variables that are spelled
  /// almost like one of these variables become remarks.
  void read_environment();
  /// Sets the value of a key, unless it has one of a later origin. Throws ConfigError, which names `where`, in the same cases as read_file.
  void set(std::string_view key, std::string_view value, Origin origin, std::string where);
  /// Throws ConfigError for settings that contradict each other.
  void expect_consistent() const;

  const Setting& setting(std::string_view key) const;
  bool is_set(std::string_view key) const { return setting(key).origin != Origin::Default; }
  /// Whether the value is equal to the default, even if it was given.
  bool is_usual(std::string_view key) const;
  const std::string& text(std::string_view key) const { return setting(key).value; }
  bool is_true(std::string_view key) const;
  int64_t integer(std::string_view key) const;
  double number(std::string_view key) const;
  /// Returns FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or HYBRID_SHARD_ZERO2: what distributed_type, the keys of both versions of
  /// FSDP and the sizes of parallelism_config mean together. If these sizes are set, they also say how many copies of the model there are.
  std::string sharding_strategy() const;

  /// Whether the sizes of parallelism_config say how ranks are divided.
  bool has_sizes() const;
  /// Throws ConfigError if there are sizes of parallelism_config that don't divide so many ranks.
  void expect_sizes_for(int64_t ranks) const;

  /// Returns a copy for readers that don't know origins: if both keys for the strategy are set, both have the strategy that wins.
  Settings settled() const;
  /// The variables for ranks: one for each key that was set, and one that says where the values of all of them come from.
  std::map<std::string, std::string> environment() const;
  /// Remarks on settings that were read but have no effect here, such as those of DeepSpeed without a counterpart.
  const std::vector<std::string>& remarks() const { return remarks_; }
  void add_remark(std::string remark);
  /// Whether Trainer::save_state writes the folders of Accelerate: as tessera_checkpoint_format says, or else fsdp_state_dict_type.
  bool saves_for_accelerate() const;

 private:
  /// The strategy that fsdp_sharding_strategy and fsdp_reshard_after_forward say; the key whose value has the later origin wins.
  std::string keyed_strategy() const;

  std::map<std::string, Setting, std::less<>> values_;
  std::vector<std::string> remarks_;
};

/// The file that `tessera config` writes unless told otherwise, in Accelerate's own place.
std::filesystem::path default_file();
/// The file that launch reads unless told otherwise: the file of TESSERA_CONFIG_FILE, or else default_file(); empty if default_file() does
/// not exist.
std::filesystem::path usual_file();

/// Whether the file is a JSON file of DeepSpeed.
bool is_deepspeed_file(const std::filesystem::path& file);

/// The text of a file as Accelerate writes it: the keys that it always writes, and all that were set.
std::string to_yaml(const Settings& settings);
/// The text of to_yaml() as JSON, which Accelerate reads from files whose names end in .json.
std::string to_json(const Settings& settings);

/// Returns the settings of the same training in the keys of fsdp_version 2. Remarks name the settings for which that version has no key.
Settings to_fsdp2(const Settings& settings);
/// Returns the settings without Tessera's own keys, which Accelerate refuses. Remarks name the settings that were left out.
Settings for_accelerate(const Settings& settings);

}  // namespace tessera::config
