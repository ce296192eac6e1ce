// Files as Accelerate writes them: sorted keys, sections in blocks.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

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

/// Launch asks for a number of ranks that nobody has given, and so does Accelerate's if the file says -1.
std::string written_value(const Settings& settings, const Key& key) {
  return key.name == "num_processes" && !settings.is_set(key.name) ? "-1" : settings.text(key.name);
}

nlohmann::json to_json_value(const Key& key, const std::string& value) {
  if (key.name == "tpu_env") return nlohmann::json::array();
  if (key.kind == Kind::Text) return value;
  if (const auto truth = to_bool(value); truth && (key.kind == Kind::Bool || value == "true" || value == "false")) return *truth;
  if (const auto number = to_integer(value)) return *number;
  return key.kind == Kind::Number ? nlohmann::json::parse(value) : nlohmann::json(value);
}

}  // namespace

std::string to_json(const Settings& settings) {
  nlohmann::json top;
  for (const auto& key : keys()) {
    if (!is_written(settings, key)) continue;
    auto& place = key.section == Section::Top ? top : top[std::string(section_name(key.section))];
    place[std::string(key.name)] = to_json_value(key, written_value(settings, key));
  }
  return top.dump(2) + "\n";
}

std::string to_yaml(const Settings& settings) {
  std::map<std::string_view, std::string> top;
  std::map<std::string_view, std::map<std::string_view, std::string>> sections;
  for (const auto& key : keys()) {
    if (!is_written(settings, key)) continue;
    auto& place = key.section == Section::Top ? top : sections[section_name(key.section)];
    place[key.name] = to_scalar(key, written_value(settings, key));
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
