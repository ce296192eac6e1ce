#include "tessera/config/keys.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "tessera/base/words.h"
#include "tessera/config/key_tables.h"

namespace tessera::config {

std::span<const Key> keys() {
  static const auto all = [] {
    std::vector<Key> both(top_keys().begin(), top_keys().end());
    both.insert(both.end(), section_keys().begin(), section_keys().end());
    return both;
  }();
  return all;
}

bool has_effect(const Key& key) {
  return key.no_effect.empty() && (key.refusal.empty() || key.choices.size() > 1);
}

// Accelerate drops this one in silence.
std::string_view todays_name(std::string_view name) {
  return name == "fsdp_backward_prefetch_policy" ? "fsdp_backward_prefetch" : name;
}

const Key* find_key(std::string_view name) {
  const auto found = std::ranges::find(keys(), todays_name(name), &Key::name);
  return found == keys().end() ? nullptr : &*found;
}

std::string_view section_name(Section section) {
  switch (section) {
    case Section::Top:
      return {};
    case Section::Fsdp:
      return "fsdp_config";
    case Section::Parallelism:
      return "parallelism_config";
    case Section::Dynamo:
      return "dynamo_config";
  }
  return {};
}

std::string suggestion(std::string_view name) {
  std::vector<std::string> known;
  for (const auto& key : keys()) known.emplace_back(key.name);
  const auto nearest = nearest_name(name, known);
  return nearest.empty() ? std::string() : fmt::format(" (did you mean {}?)", nearest);
}

}  // namespace tessera::config
