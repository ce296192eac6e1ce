// Formats text as fmt does, for headers that programs include, because such headers can't include fmt.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

namespace tessera {

/// A value to format. Strings and paths must last as long as the call.
using FormatValue = std::variant<bool, char, int64_t, uint64_t, float, double, std::string_view>;

/// Takes a number, a character, a string or a path.
template <class T>
FormatValue format_value(const T& value) {
  if constexpr (std::same_as<T, bool> || std::same_as<T, char> || std::same_as<T, float>) {
    return value;
  } else if constexpr (std::floating_point<T>) {
    return static_cast<double>(value);
  } else if constexpr (std::integral<T>) {
    return static_cast<std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>(value);
  } else if constexpr (std::convertible_to<const T&, std::string_view>) {
    return std::string_view(value);
  } else {
    return std::string_view(value.native());
  }
}

/// A format with a place for each of these values, such as "{} of {}" or "{1} of {0}". The compiler refuses a format that does not fit the
/// values.
template <class... Values>
struct FormatString {
  template <class T>
  requires std::convertible_to<const T&, std::string_view>
  consteval FormatString(const T& format) : text(format) {  // NOLINT(google-explicit-constructor)
    constexpr bool kNumbers[] = {std::is_arithmetic_v<Values>..., false};
    size_t next = 0, most = 0;
    for (size_t i = 0; i < text.size(); i++) {
      if (text[i] != '{' && text[i] != '}') continue;
      if (i + 1 < text.size() && text[i + 1] == text[i]) {  // an escaped brace
        i++;
        continue;
      }
      const auto end = text.find('}', i);
      if (text[i] == '}' || end == std::string_view::npos) throw "the format has an unmatched brace";
      const auto place = text.substr(i + 1, end - i - 1);
      i = end;
      const bool has_index = !place.empty() && place[0] >= '0' && place[0] <= '9';
      const size_t index = has_index ? static_cast<size_t>(place[0] - '0') : next++;
      most = std::max(most, index + 1);
      const auto spec = place.substr(has_index ? 1 : 0);
      if (index >= sizeof...(Values)) throw "the format has a place for a value that is not given";
      if (!spec.empty() && (spec[0] != ':' || !kNumbers[index])) throw "only numbers may have more than {} in the format";
    }
    if (most != sizeof...(Values)) throw "the format has no place for a value that is given";
  }

  std::string_view text;
};

std::string format_values(std::string_view format, std::span<const FormatValue> values);

template <class... Values>
std::string formatted(FormatString<std::type_identity_t<Values>...> format, const Values&... values) {
  return format_values(format.text, std::array<FormatValue, sizeof...(Values)>{format_value(values)...});
}

/// Formats all elements of a range, with `separator` between them.
template <class Range>
std::string joined(Range&& range, std::string_view separator = ", ") {
  std::string text;
  bool first = true;
  for (const auto& each : range) {
    if (!first) text += separator;
    first = false;
    text += formatted("{}", each);
  }
  return text;
}

}  // namespace tessera
