#include "tessera/config/value.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "tessera/base/error.h"
#include "tessera/base/words.h"

namespace tessera::config {
namespace {

std::optional<double> to_number(std::string_view text) {
  const auto value = number_of<double>(text);
  return value && std::isfinite(*value) ? value : std::nullopt;
}

/// Compares words in any case. Words with the same truth value, such as no and false, are equal, because YAML may have turned one of them
/// into the other.
bool is_same_word(std::string_view text, std::string_view other) {
  const auto truth = to_bool(text);
  return lower(text) == lower(other) || (truth && to_bool(other) == truth && to_integer(other) == to_integer(text));
}

std::optional<std::string> to_choice(const Key& key, std::string_view text) {
  const auto is_it = [&](std::string_view choice) { return is_same_word(text, choice); };
  const auto found = std::ranges::find_if(key.choices, is_it);
  if (found != key.choices.end()) return std::string(*found);
  const auto number = to_integer(text).value_or(0);
  if (key.section != Section::Fsdp || number < 1 || number > std::ssize(key.choices)) return std::nullopt;
  return std::string(key.choices[static_cast<size_t>(number - 1)]);
}

std::optional<std::string> spelled(const Key& key, std::string_view text) {
  switch (key.kind) {
    case Kind::Bool:
      if (const auto value = to_bool(text)) return *value ? "true" : "false";
      return std::nullopt;
    case Kind::Integer:
      if (const auto value = to_integer(text); value && *value >= key.least && *value <= key.most) return fmt::format("{}", *value);
      return std::nullopt;
    case Kind::Number:
      if (const auto value = to_number(text); value && *value >= static_cast<double>(key.least) && *value <= static_cast<double>(key.most))
        return fmt::format("{}", *value);
      return std::nullopt;
    case Kind::Choice:
      return to_choice(key, text);
    case Kind::Text:
      return std::string(is_same_word(text, key.otherwise) ? key.otherwise : text);
  }
  return std::nullopt;
}

std::string range_of(const Key& key) {
  return key.most == kNoLimit ? fmt::format("from {} on", key.least) : fmt::format("from {} to {}", key.least, key.most);
}

}  // namespace

std::optional<bool> to_bool(std::string_view text) {
  constexpr std::array<std::string_view, 5> kTrue = {"true", "yes", "on", "y", "1"}, kFalse = {"false", "no", "off", "n", "0"};
  const auto word = lower(text);
  if (std::ranges::find(kTrue, word) != kTrue.end()) return true;
  if (std::ranges::find(kFalse, word) != kFalse.end()) return false;
  return std::nullopt;
}

std::optional<int64_t> to_integer(std::string_view text) {
  if (const auto value = number_of<int64_t>(text)) return value;
  constexpr double kExact = 9007199254740992;  // larger whole numbers are not exact in a double
  const auto number = to_number(text);
  if (!number || std::abs(*number) > kExact || *number != std::trunc(*number)) return std::nullopt;
  return static_cast<int64_t>(*number);
}

std::string describe_values(const Key& key) {
  switch (key.kind) {
    case Kind::Bool:
      return "true or false";
    case Kind::Integer:
      return "a whole number " + range_of(key);
    case Kind::Number:
      return "a number " + range_of(key);
    case Kind::Choice:
      return key.choices.size() == 1 ? std::string(key.choices[0]) : fmt::format("one of {}", fmt::join(key.choices, ", "));
    case Kind::Text:
      return "a text";
  }
  return {};
}

std::string to_value(const Key& key, std::string_view text) {
  const auto value = spelled(key, text);
  const auto shown = fmt::format("{} '{}'", key.name, printable(text));
  if (!value) {
    const bool has_reason = key.kind == Kind::Choice && !key.reason.empty() && (key.refused.empty() || lower(key.refused) == lower(text));
    throw ConfigError("{} is not {}{}{}", shown, describe_values(key), has_reason ? ": " : "", has_reason ? key.reason : "");
  }
  if (key.effect == Effect::Refused && *value != key.otherwise) throw ConfigError("{} is refused: {}", shown, key.reason);
  if (std::ranges::any_of(*value, [](unsigned char letter) { return letter < ' '; })) {
    throw ConfigError("{} has a control character", shown);
  }
  return *value;
}

}  // namespace tessera::config
