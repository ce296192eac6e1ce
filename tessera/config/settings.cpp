#include "tessera/config/settings.h"

#include <fmt/format.h>
#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <utility>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/launch_record.h"
#include "tessera/base/words.h"
#include "tessera/config/value.h"

namespace tessera::config {
namespace {

/// This variable says only whether distributed_type is FSDP.
constexpr std::string_view kUseFsdp = "ACCELERATE_USE_FSDP";

std::string from_variable(const Key& key, const std::string& value) {
  if (key.variable != kUseFsdp) return value;
  const auto uses_fsdp = to_bool(value);
  if (!uses_fsdp) throw ConfigError("{}: '{}' is not true or false", key.variable, printable(value));
  return *uses_fsdp ? "FSDP" : "NO";
}

std::string to_variable(const Key& key, const std::string& value) {
  if (key.variable != kUseFsdp) return value;
  return value == "FSDP" ? "true" : "false";
}

/// Returns the value of a key's variable; nothing if it is unset or empty. Unlike env(), also reads the variable of a program's own key, which
/// may be in no table.
std::optional<std::string> variable(const Key& key) {
  const char* value = std::getenv(key.variable.c_str());
  return value == nullptr || *value == '\0' ? std::nullopt : std::optional<std::string>(value);
}

std::string home() {
  if (auto folder = env("HOME")) return *folder;
  const auto* user = ::getpwuid(::getuid());
  if (user == nullptr)
    throw ConfigError("there is no HOME in the environment, so there is no folder for the configuration; name a file with --config-file");
  return user->pw_dir;
}

/// Returns the variable that the user may have meant by a mistyped name; empty if the name has no prefix of Accelerate's variables, or is
/// not like any variable that Tessera reads.
std::string meant_variable(const std::string& name) {
  std::vector<std::string> known;
  for (const auto& key : keys()) {
    if (!key.variable.empty()) known.emplace_back(key.variable);
  }
  const bool is_fsdp = name.starts_with("FSDP_");
  const bool is_theirs = is_fsdp || name.starts_with("ACCELERATE_") || name.starts_with("PARALLELISM_CONFIG_");
  if (!is_theirs || std::ranges::find(known, name) != known.end()) return {};
  if (const auto* key = find_key(lower(name))) return key->variable;
  if (is_fsdp) return nearest_name(name, known, "FSDP_");
  // Accelerate has many more variables than Tessera reads, so only a name that differs by at most two letters is taken for a mistyped one.
  constexpr size_t kLetters = 4;  // nearest_name() allows half as many wrong letters
  const bool is_known_elsewhere = name == "ACCELERATE_USE_XPU";
  return !is_known_elsewhere ? nearest_name(name, known, name.substr(0, name.size() - kLetters)) : std::string();
}

std::vector<std::string> remarks_on_environment() {
  std::vector<std::string> remarks;
  for (char** entry = environ; *entry != nullptr; entry++) {
    const std::string text = *entry;
    const auto name = text.substr(0, text.find('='));
    if (name.size() + 1 >= text.size()) continue;  // env() treats an empty variable as unset
    if (const auto meant = meant_variable(name); !meant.empty())
      remarks.push_back(fmt::format("the environment has {}, which Tessera does not read (did you mean {}?)", name, meant));
  }
  std::ranges::sort(remarks);
  return remarks;
}

constexpr auto kOrigins = "TESSERA_SETTINGS_FROM";

/// `tessera launch` passes settings to the ranks in environment variables, and tells them in TESSERA_SETTINGS_FROM where each setting came
/// from. This function reads TESSERA_SETTINGS_FROM. It has a line for each of the other variables: its name, the setting's value, 1 if a
/// file gave the value or else 2, and the place, such as "config.yaml:7".
std::map<std::string, Setting> told_settings() {
  std::map<std::string, Setting> told;
  std::istringstream lines(env(kOrigins).value_or(""));
  for (std::string variable, value, origin, where; std::getline(lines, variable, '\t') && std::getline(lines, value, '\t') &&
                                                   std::getline(lines, origin, '\t') && std::getline(lines, where);) {
    told[variable] = {.value = value, .origin = origin == "1" ? Origin::File : Origin::Flag, .where = where};
  }
  return told;
}

}  // namespace

Settings::Settings() {
  for (const auto& key : keys()) values_.emplace(key.name, Setting{.value = std::string(key.otherwise)});
}

void Settings::set(std::string_view key, std::string_view value, Origin origin, std::string where) try {
  const auto* known = find_key(key);
  if (known == nullptr) throw ConfigError("there is no key '{}'{}", printable(key), suggestion(key));
  auto spelled = to_value(*known, value);
  auto& now = values_.find(known->name)->second;
  if (now.origin > origin) return;
  if (known->effect == Effect::None && spelled != known->otherwise)
    add_remark(fmt::format("{}: {} {} has no effect: {}", where, known->name, spelled, known->reason));
  now = {.value = std::move(spelled), .origin = origin, .where = where};
} catch (const ConfigError& error) {
  throw ConfigError("{}: {}", where, error.what());
}

void Settings::read_environment() {
  const auto told = told_settings();
  for (const auto& key : keys()) {
    if (key.variable.empty()) continue;
    const auto value = variable(key);
    if (!value) continue;
    const auto found = told.find(key.variable);
    if (found != told.end() && to_variable(key, found->second.value) == *value) {
      set(key.name, found->second.value, found->second.origin, found->second.where);
    } else {
      set(key.name, from_variable(key, *value), Origin::Environment, key.variable);
    }
  }
  for (auto& remark : remarks_on_environment()) add_remark(std::move(remark));
  record_settings(static_cast<int>(to_integer(env("RANK").value_or("")).value_or(0)));
}

const Setting& Settings::setting(std::string_view key) const {
  const auto* known = find_key(key);
  if (known == nullptr) throw UsageError("there is no key '{}'{}", key, suggestion(key));
  return values_.find(known->name)->second;
}

bool Settings::is_usual(std::string_view key) const {
  return text(key) == find_key(key)->otherwise;
}

bool Settings::is_true(std::string_view key) const {
  return text(key) == "true";
}

int64_t Settings::integer(std::string_view key) const {
  const auto value = to_integer(text(key));
  if (!value) throw UsageError("{} '{}' is not a whole number", key, text(key));
  return *value;
}

double Settings::number(std::string_view key) const {
  return std::strtod(text(key).c_str(), nullptr);
}

void Settings::add_remark(std::string remark) {
  if (std::ranges::find(remarks_, remark) == remarks_.end()) remarks_.push_back(std::move(remark));
}

std::map<std::string, std::string> Settings::environment() const {
  std::map<std::string, std::string> variables;
  const auto settings = settled();
  for (const auto& key : keys()) {
    const auto& [value, origin, where] = settings.setting(key.name);
    if (key.variable.empty() || origin == Origin::Default || value.empty()) continue;
    variables[key.variable] = to_variable(key, value);
    if (origin == Origin::Environment || where.find_first_of("\t\n") != std::string::npos) continue;
    variables[kOrigins] += fmt::format("{}\t{}\t{}\t{}\n", key.variable, value, origin == Origin::File ? 1 : 2, where);
  }
  return variables;
}

std::filesystem::path usual_file() {
  if (auto file = env("TESSERA_CONFIG_FILE")) return *file;
  auto file = default_file();
  std::error_code hidden;  // the home may be another user's, whose files can't be seen
  return std::filesystem::exists(file, hidden) ? file : std::filesystem::path();
}

std::filesystem::path default_file() {
  const auto place = [](const std::string& folder) -> std::filesystem::path {
    return folder.starts_with("~/") ? home() + folder.substr(1) : folder;
  };
  const auto name = std::filesystem::path("accelerate") / "default_config.yaml";
  if (const auto folder = env("HF_HOME")) return place(*folder) / name;
  return place(env("XDG_CACHE_HOME").value_or("~/.cache")) / "huggingface" / name;
}

}  // namespace tessera::config
