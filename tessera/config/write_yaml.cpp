// Writes files as Accelerate does: with sorted keys, and sections in blocks.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/config/settings.h"
#include "tessera/config/value.h"

namespace tessera::config {
namespace {

using nlohmann::json;

/// Whether YAML 1.1 reads an unquoted word as text, and not as a number, a truth value or null.
bool is_plain(const std::string& text) {
  const auto is_letter = [](char letter) { return (letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z') || letter == '_'; };
  const auto is_fine = [&](char letter) {
    return is_letter(letter) || (letter >= '0' && letter <= '9') || letter == '.' || letter == '/' || letter == '-';
  };
  return !text.empty() && is_letter(text[0]) && std::ranges::all_of(text, is_fine) && !to_bool(text) && text != "null" && text != "Null" &&
         text != "NULL";
}

std::string to_scalar(const json& value) {
  if (!value.is_string()) return value.dump();
  const auto text = value.get<std::string>();
  if (is_plain(text)) return text;
  std::string result = "'";
  for (const char letter : text) result += letter == '\'' ? "''" : std::string(1, letter);
  return result + "'";
}

bool is_written(const Settings& settings, const Key& key) {
  if (key.section == Section::Dynamo) return false;  // no key of this section has an effect
  const bool is_of_fsdp = key.section == Section::Fsdp || key.section == Section::Parallelism;
  if (is_of_fsdp && settings.text("distributed_type") != "FSDP" && !settings.is_set(key.name)) return false;
  return key.is_written || (settings.is_set(key.name) && !(key.kind == Kind::Text && settings.text(key.name).empty()));
}

json to_json_value(const Key& key, const std::string& value) {
  if (!is_utf8(value)) {
    throw ConfigError("{} is '{}', which is not UTF-8, as YAML and JSON have to be; write it in UTF-8, or leave it out", key.name,
                      printable(value));
  }
  if (key.name == "tpu_env") return json::array();
  if (key.kind == Kind::Text) return value;
  if (value == "true" || value == "false") return value == "true";
  if (const auto number = to_integer(value)) return *number;
  return key.kind == Kind::Number ? json::parse(value) : json(value);
}

json to_tree(const Settings& given) {
  const auto settings = given.settled();
  json top;
  for (const auto& key : keys()) {
    if (!is_written(settings, key)) continue;
    // Writes -1 if the number of ranks was not given: Accelerate's launch then demands it, as ours does.
    const bool is_open = key.name == "num_processes" && !settings.is_set(key.name);
    const auto section = key.is_of_deepspeed ? "deepspeed_config" : section_name(key.section);
    auto& place = section.empty() ? top : top[std::string(section)];
    place[std::string(key.name)] = to_json_value(key, is_open ? "-1" : settings.text(key.name));
  }
  return top;
}

}  // namespace

std::string to_json(const Settings& settings) {
  return to_tree(settings).dump(2) + "\n";
}

std::string to_yaml(const Settings& settings) {
  const auto tree = to_tree(settings);
  std::string text;
  for (const auto& [name, value] : tree.items()) {
    text += value.is_object() ? name + ":\n" : fmt::format("{}: {}\n", name, to_scalar(value));
    if (!value.is_object()) continue;
    for (const auto& [key, inner] : value.items()) text += fmt::format("  {}: {}\n", key, to_scalar(inner));
  }
  return text;
}

}  // namespace tessera::config
