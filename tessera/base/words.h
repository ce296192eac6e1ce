// Words for messages.
#pragma once

#include <charconv>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace tessera {

/// The words of a text, between blanks.
std::vector<std::string> words_in(const std::string& text);

/// "rank 2", "ranks 0, 1 and 3"
std::string name_ranks(std::span<const int> ranks);

/// "'a', 'b' and 7 more"
std::string some_of(const std::vector<std::string>& names);

/// "1 file", "2 files"
std::string counted(int64_t number, std::string_view thing);

/// Three digits in the unit that fits; each unit is a thousand of the one before: in_unit(1.5e6, {"B", "kB", "MB"}) is "1.5 MB".
std::string in_unit(double value, std::initializer_list<std::string_view> units);
/// "1.5 MB"
std::string size_text(double bytes);
/// "20 ms", from "us" to "s"
std::string duration_text(double seconds);

/// The text with control characters as "\x1b", so that a terminal shows them instead of obeying them. Characters in `kept` stay.
std::string printable(std::string_view text, std::string_view kept = {});

/// lower() and upper() change only ASCII letters.
std::string lower(std::string_view text);
std::string upper(std::string_view text);

/// Parses a text that is a number and nothing else; nothing if it is not.
template <class Number>
std::optional<Number> number_of(std::string_view text) {
  Number value{};
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  return failure == std::errc{} && end == text.data() + text.size() ? std::optional(value) : std::nullopt;
}

/// Whether a text is UTF-8 as Python writes it: without surrogates.
bool is_utf8(std::string_view text);

/// Levenshtein distance: how many letters must be inserted, deleted or replaced to turn one name into the other.
size_t edit_distance(std::string_view one, std::string_view other);

/// The known name that is most like a mistyped one, for "did you mean"; empty if no known name is similar. All names begin with `prefix`.
std::string nearest_name(std::string_view name, const std::vector<std::string>& known, std::string_view prefix = {});

}  // namespace tessera
