// Reads a YAML file into a tree whose values know their lines.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::config {

struct YamlValue {
  enum class Shape { Null, Scalar, List, Map };

  Shape shape = Shape::Null;
  std::string text = {};                // the text of a scalar
  std::vector<std::string> names = {};  // the names of a map, one for each of `values`
  std::vector<YamlValue> values = {};   // the values of a list or a map
  std::string where = {};               // "config.yaml:7"

  bool is_map() const { return shape == Shape::Map; }
  bool is_empty() const { return shape == Shape::Null || (shape != Shape::Scalar && values.empty()); }
  /// Returns null if this is not a map, or does not have the name.
  const YamlValue* find(std::string_view name) const;
};

/// Throws IoError if the file can't be read, and ConfigError, with the line, if it is not YAML, a map has a name twice, or a number is
/// written like 010. Merges the maps of << keys, as YAML 1.1 says.
YamlValue read_yaml(const std::filesystem::path& file);

}  // namespace tessera::config
