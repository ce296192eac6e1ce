#include "tessera/base/env.h"

#include <algorithm>
#include <cstdlib>

#include "tessera/base/env_table.h"
#include "tessera/base/error.h"
#include "tessera/base/words.h"

namespace tessera {

std::optional<std::string> env(const char* name) {
  if (!is_known_env(name)) {
    throw Error("environment variable {} is not in the table; add it to tessera/base/env_table.cpp or, if a key has it, to tessera/config/keys.cpp", name);
  }
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

std::optional<int64_t> env_int(const char* name, int64_t low, int64_t high) {
  const auto text = env(name);
  if (!text) return std::nullopt;
  const auto value = number_of<int64_t>(*text);
  if (!value || *value < low || *value > high) {
    throw ConfigError("environment variable {}='{}' is not a whole number from {} to {}", name, *text, low, high);
  }
  return value;
}

std::optional<size_t> env_choice(const char* name, std::span<const std::string_view> choices) {
  const auto text = env(name);
  if (!text) return std::nullopt;
  const auto found = std::ranges::find(choices, *text);
  if (found == choices.end()) {
    throw ConfigError("environment variable {}='{}' is unknown; choose one of {}", name, *text, joined(choices));
  }
  return static_cast<size_t>(found - choices.begin());
}

}  // namespace tessera
