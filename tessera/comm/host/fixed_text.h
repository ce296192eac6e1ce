// Text in a field of fixed size, for messages and records that allocate no memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstring>
#include <string_view>

namespace tessera {

/// Zeros follow a text that is shorter than the field.
template <size_t kSize>
struct FixedText {
  std::array<char, kSize> chars = {};

  /// Takes as much of the text as there is room for: its beginning (prefix), or its end (suffix).
  void assign_prefix(std::string_view text) {
    chars.fill('\0');
    text.copy(chars.data(), kSize);
  }
  void assign_suffix(std::string_view text) { assign_prefix(text.size() > kSize ? text.substr(text.size() - kSize) : text); }

  std::string_view view() const { return {chars.data(), strnlen(chars.data(), kSize)}; }
  bool empty() const { return chars.front() == '\0'; }
  bool operator==(const FixedText&) const = default;
};

}  // namespace tessera
