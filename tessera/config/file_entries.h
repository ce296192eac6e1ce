// The keys that a file sets, by their current names.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/format.h"
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
  void remark(std::string_view where, std::string_view text) { remarks.push_back(formatted("{}: {}", where, text)); }
};

/// Reads a file of Accelerate. Throws ConfigError for unknown keys and invalid values.
FileEntries accelerate_entries(const YamlValue& root);

bool is_deepspeed(const YamlValue& root);
/// Reads the JSON file of DeepSpeed. Values without a counterpart become remarks.
FileEntries deepspeed_entries(const YamlValue& root);
/// Reads the section deepspeed_config of Accelerate's files, which may name a JSON file of DeepSpeed.
FileEntries deepspeed_section_entries(const YamlValue& section);

}  // namespace tessera::config
