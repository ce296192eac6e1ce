// What a file says about keys, in the names of today.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/config/yaml_tree.h"

namespace tessera::config {

struct FileEntry {
  std::string key, value, where;
};

struct FileEntries {
  std::vector<FileEntry> entries;
  std::vector<std::string> remarks;

  void add(std::string_view key, std::string_view value, std::string_view where) {
    entries.push_back({std::string(key), std::string(value), std::string(where)});
  }
};

/// Throws ConfigError for keys that nobody knows and for values that are none.
FileEntries accelerate_entries(const YamlValue& root);

bool is_deepspeed(const YamlValue& root);
/// Whether a key, good for any training here, is one that Accelerate knows in its section deepspeed_config only.
bool is_of_deepspeed_section(std::string_view key);
/// The JSON file of DeepSpeed. What has no counterpart becomes a remark.
FileEntries deepspeed_entries(const YamlValue& root);
/// The section deepspeed_config of Accelerate's files, which may name such a JSON file.
FileEntries deepspeed_section_entries(const YamlValue& section);

}  // namespace tessera::config
