#include "tessera/config/keys.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "tessera/base/words.h"
#include "tessera/config/key_tables.h"

namespace tessera::config {
namespace {

struct SectionNames {
  std::string_view name, prefix;
};

/// In the order of Section.
constexpr std::array<SectionNames, 5> kNames = {{{"", ""},
                                                 {"fsdp_config", "fsdp_"},
                                                 {"tessera_config", "tessera_"},
                                                 {"parallelism_config", "parallelism_config_"},
                                                 {"dynamo_config", "dynamo_"}}};

Key completed(Key key) {
  for (const auto section : kSections) {
    if (key.name.starts_with(section_prefix(section))) key.section = section;
  }
  if (!key.choices.empty()) {
    key.kind = Kind::Choice;
  } else if (key.otherwise == "true" || key.otherwise == "false") {
    key.kind = Kind::Bool;
  } else if (key.kind == Kind::Text && key.otherwise.find_first_of("0123456789") == 0) {
    key.kind = Kind::Integer;
  }
  if (key.section != Section::Top && key.variable.empty() && has_effect(key)) key.variable = upper(key.name);
  return key;
}

}  // namespace

std::span<const Key> keys() {
  static const auto all = [] {
    auto both = keys_with_effect();
    std::ranges::move(keys_without_effect(), std::back_inserter(both));
    for (auto& key : both) key = completed(std::move(key));
    return both;
  }();
  return all;
}

// Accelerate drops this older name in silence.
std::string_view todays_name(std::string_view name) {
  return name == "fsdp_backward_prefetch_policy" ? "fsdp_backward_prefetch" : name;
}

const Key* find_key(std::string_view name) {
  const auto found = std::ranges::find(keys(), todays_name(name), &Key::name);
  return found == keys().end() ? nullptr : &*found;
}

std::string_view section_name(Section section) {
  return kNames.at(static_cast<size_t>(section)).name;
}

std::string_view section_prefix(Section section) {
  return kNames.at(static_cast<size_t>(section)).prefix;
}

/// The key that has this name without the prefix of its section.
static const Key* find_without_prefix(std::string_view name) {
  for (const auto section : kSections) {
    if (const auto* key = find_key(fmt::format("{}{}", section_prefix(section), name))) return key;
  }
  return nullptr;
}

std::string places_of(std::string_view name) {
  if (const auto* key = find_key(name)) {
    const auto section = section_name(key->section);
    return section.empty() ? fmt::format(" here ({} belongs at the top of the file)", key->name)
                           : fmt::format(" here ({} belongs under {})", key->name, section);
  }
  const auto* key = find_without_prefix(name);
  return key == nullptr ? std::string() : places_of(key->name);
}

std::string suggestion(std::string_view name) {
  std::vector<std::string> known;
  for (const auto& key : keys()) known.emplace_back(key.name);
  const auto* key = find_without_prefix(name);
  const auto nearest = key == nullptr ? nearest_name(name, known) : std::string(key->name);
  return nearest.empty() ? std::string() : fmt::format(" (did you mean {}?)", nearest);
}

}  // namespace tessera::config
