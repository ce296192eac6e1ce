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

/// A later one wins.
enum class Origin { Default, File, Environment, Flag, Code };

struct Setting {
  std::string value;
  Origin origin = Origin::Default;
  std::string where = {};  // "config.yaml:7", "FSDP_VERSION", "--fsdp-version"
};

class Settings {
 public:
  /// All keys have their defaults.
  Settings();

  /// A YAML or JSON file of Accelerate, or a JSON file of DeepSpeed. Throws ConfigError, with file and line, for a key that nobody knows,
  /// a value that makes no sense, and one that is refused.
  void read_file(const std::filesystem::path& file);
  /// The variables of all keys that have one. A value that launch has told keeps the origin that it had there. What is spelled almost like
  /// a variable becomes a remark.
  void read_environment();
  /// Does nothing if the key has a value of a later origin. Throws ConfigError, which names `where`, as read_file does.
  void set(std::string_view key, std::string_view value, Origin origin, std::string where);
  /// Throws ConfigError for settings that contradict each other.
  void expect_consistent() const;

  const Setting& setting(std::string_view key) const;
  bool is_set(std::string_view key) const { return setting(key).origin != Origin::Default; }
  const std::string& text(std::string_view key) const { return setting(key).value; }
  bool is_true(std::string_view key) const;
  int64_t integer(std::string_view key) const;
  double number(std::string_view key) const;
  /// FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or HYBRID_SHARD_ZERO2: what distributed_type, the keys of both versions of FSDP and
  /// the sizes of parallelism_config mean together. If these sizes are set, they also say how many copies there are.
  std::string sharding_strategy() const;

  /// Whether the sizes of parallelism_config say how ranks are divided.
  bool has_sizes() const;
  /// Throws ConfigError if there are sizes of parallelism_config that don't divide so many ranks.
  void expect_sizes_for(int64_t ranks) const;

  /// The same for readers who know of no origins: where both keys for a strategy are set, they say the same.
  Settings settled() const;
  /// The variables for ranks: of what was set, and one with the origins of their values.
  std::map<std::string, std::string> environment() const;
  /// What was read but has no effect here, such as settings of DeepSpeed without a counterpart.
  const std::vector<std::string>& remarks() const { return remarks_; }
  void add_remark(std::string remark);
  /// Whether Trainer::save_state writes the folders of Accelerate: as tessera_checkpoint_format says, or else fsdp_state_dict_type.
  bool saves_for_accelerate() const;

 private:
  /// The strategy; of its two keys, the one with the stronger origin wins.
  std::string keyed_strategy() const;

  std::map<std::string, Setting, std::less<>> values_;
  std::vector<std::string> remarks_;
};

/// Where `tessera config` writes unless told otherwise: Accelerate's own place.
std::filesystem::path default_file();
/// What launch reads unless told otherwise: the file that TESSERA_CONFIG_FILE names, or else default_file(); empty if that isn't there.
std::filesystem::path usual_file();

/// Whether the file is a JSON file of DeepSpeed.
bool is_deepspeed_file(const std::filesystem::path& file);

/// The text of a file as Accelerate writes it: the keys that it always writes, and all that were set.
std::string to_yaml(const Settings& settings);
/// The same as JSON, which Accelerate reads from files of that name.
std::string to_json(const Settings& settings);

/// The same training in the keys of fsdp_version 2. Its remarks say what that version has no key for.
Settings to_fsdp2(const Settings& settings);
/// Without the keys that Accelerate refuses: Tessera's own. Its remarks say which those are.
Settings for_accelerate(const Settings& settings);

}  // namespace tessera::config
