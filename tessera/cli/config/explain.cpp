#include "tessera/cli/config/explain.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <vector>

#include "tessera/base/env_table.h"
#include "tessera/base/table.h"

namespace tessera::cli {
namespace {

std::string origin_of(const config::Setting& setting) {
  constexpr std::array kOrigins = {"default", "file ", "environment ", "flag ", "code "};
  const bool is_default = setting.origin == config::Origin::Default;
  return kOrigins.at(static_cast<size_t>(setting.origin)) + (is_default ? "" : setting.where);
}

/// The source of a setting. origins_of_ranks() shows settings of one source in one line.
std::string source_of(const config::Setting& setting) {
  if (setting.origin == config::Origin::File) return setting.where.substr(0, setting.where.rfind(':'));
  return setting.origin == config::Origin::Environment ? "environment" : "flags";
}

}  // namespace

std::vector<std::string> origins_of_ranks(const config::Settings& settings) {
  std::vector<std::pair<std::string, std::string>> lines;
  for (const auto& key : config::keys()) {
    const auto& setting = settings.setting(key.name);
    const bool is_as_ever = setting.origin <= config::Origin::File && setting.value == key.otherwise;
    if (is_as_ever || key.variable.empty() || !has_effect(key) || setting.value.empty()) continue;
    const auto source = source_of(setting);
    auto line = std::ranges::find(lines, source, &std::pair<std::string, std::string>::first);
    if (line == lines.end()) line = lines.insert(lines.end(), {source, source + ": "});
    line->second += fmt::format("{}{} {}", line->second.ends_with(": ") ? "" : ", ", key.name, setting.value);
  }
  std::vector<std::string> texts;
  for (auto& [source, text] : lines) texts.push_back(std::move(text));
  return texts;
}

std::string explanation(const config::Settings& settings) {
  std::vector<std::array<std::string, 3>> rows;
  for (const auto& key : config::keys()) {
    const auto& setting = settings.setting(key.name);
    if (has_effect(key) || settings.is_set(key.name))
      rows.push_back({std::string(key.name), setting.value.empty() ? "-" : setting.value, origin_of(setting)});
  }
  auto text = table_of(rows, "<<<");
  text += fmt::format("\nThe sharding strategy is {}.\n", settings.sharding_strategy());
  for (const auto& remark : settings.remarks()) text += remark + "\n";
  if (const auto unknown = warning_of_unknown_env()) text += *unknown + "\n";
  return text;
}

}  // namespace tessera::cli
