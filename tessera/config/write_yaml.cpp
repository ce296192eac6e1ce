// Files as Accelerate writes them: sorted keys, sections in blocks.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>

#include "tessera/config/file_entries.h"
#include "tessera/config/settings.h"
#include "tessera/config/value.h"

namespace tessera::config {
namespace {

// It always writes these, and its own readers need the first one.
constexpr std::array<std::string_view, 15> kAlwaysWritten = {
    "distributed_type", "compute_environment", "debug",        "downcast_bf16", "enable_cpu_affinity",
    "machine_rank",     "mixed_precision",     "num_machines", "num_processes", "main_training_function",
    "rdzv_backend",     "same_network",        "tpu_env",      "use_cpu",       "fsdp_version"};

/// Whether YAML 1.1 reads a word as the text that it is, and not as a number, a truth or nothing.
bool is_plain(const std::string& text) {
  const auto is_letter = [](char letter) { return (letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z') || letter == '_'; };
  const auto is_fine = [&](char letter) {
    return is_letter(letter) || (letter >= '0' && letter <= '9') || letter == '.' || letter == '/' || letter == '-';
  };
  return !text.empty() && is_letter(text[0]) && std::ranges::all_of(text, is_fine) && !to_bool(text) && text != "null" && text != "Null" &&
         text != "NULL";
}

std::string quoted_if_needed(const std::string& text) {
  if (is_plain(text)) return text;
  std::string result = "'";
  for (const char letter : text) result += letter == '\'' ? "''" : std::string(1, letter);
  return result + "'";
}

std::string to_scalar(const Key& key, const std::string& value) {
  if (key.name == "tpu_env") return "[]";
  const bool is_plain_choice = key.kind == Kind::Choice && (value == "true" || value == "false" || to_integer(value));
  if (is_plain_choice || (key.kind != Kind::Text && key.kind != Kind::Choice)) return value;
  return quoted_if_needed(value);
}

bool is_written(const Settings& settings, const Key& key) {
  if (key.section == Section::Dynamo) return false;  // nothing in it has an effect
  const bool has_fsdp = settings.text("distributed_type") == "FSDP";
  if (key.section != Section::Top && !has_fsdp) return false;
  if (std::ranges::find(kAlwaysWritten, key.name) != kAlwaysWritten.end()) return true;
  return settings.is_set(key.name) && !(key.kind == Kind::Text && settings.text(key.name).empty());
}

nlohmann::json to_json_value(const Key& key, const std::string& value) {
  if (key.name == "tpu_env") return nlohmann::json::array();
  if (key.kind == Kind::Text) return value;
  if (const auto truth = to_bool(value); truth && (key.kind == Kind::Bool || value == "true" || value == "false")) return *truth;
  if (const auto number = to_integer(value)) return *number;
  return key.kind == Kind::Number ? nlohmann::json::parse(value) : nlohmann::json(value);
}

struct WrittenKey {
  const Key& key;
  std::string section, value;
};

std::vector<WrittenKey> written_keys(const Settings& given) {
  const auto settings = given.settled();
  std::vector<WrittenKey> written;
  for (const auto& key : keys()) {
    if (!is_written(settings, key)) continue;
    // Launch asks for a number of ranks that nobody has given, and so does Accelerate's if the file says -1.
    const bool is_open = key.name == "num_processes" && !settings.is_set(key.name);
    const auto section = is_of_deepspeed_section(key.name) ? "deepspeed_config" : section_name(key.section);
    written.push_back({.key = key, .section = std::string(section), .value = is_open ? "-1" : settings.text(key.name)});
  }
  return written;
}

}  // namespace

std::string to_json(const Settings& settings) {
  nlohmann::json top;
  for (const auto& [key, section, value] : written_keys(settings)) {
    auto& place = section.empty() ? top : top[section];
    place[std::string(key.name)] = to_json_value(key, value);
  }
  return top.dump(2) + "\n";
}

std::string to_yaml(const Settings& settings) {
  std::map<std::string, std::string> top;
  std::map<std::string, std::map<std::string_view, std::string>> sections;
  for (const auto& [key, section, value] : written_keys(settings)) {
    const auto scalar = to_scalar(key, value);
    if (section.empty()) {
      top.emplace(key.name, scalar);
    } else {
      sections[section].emplace(key.name, scalar);
    }
  }
  for (const auto& [name, values] : sections) {
    std::string block;
    for (const auto& [key, value] : values) block += fmt::format("\n  {}: {}", key, value);
    top[name] = block;
  }
  std::string text;
  for (const auto& [key, value] : top) text += fmt::format("{}:{}{}\n", key, value.starts_with('\n') ? "" : " ", value);
  return text;
}

}  // namespace tessera::config
