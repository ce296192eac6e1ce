// Rows of texts as a table.
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Columns are as wide as the longest text in them. `sides` has '<' for each column that is aligned left, and '>' for each that is aligned
/// right. A last column that is aligned left is not padded.
template <size_t N>
std::string table_of(const std::vector<std::array<std::string, N>>& rows, std::string_view sides) {
  std::array<size_t, N> widths{};
  for (const auto& row : rows) {
    for (size_t i = 0; i < N; i++) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    for (size_t i = 0; i < N; i++) {
      const bool is_last = i + 1 == N;
      const auto gap = std::string(widths[i] - row[i].size(), ' ');
      text += sides[i] == '<' ? row[i] + (is_last ? "" : gap) : gap + row[i];
      text += is_last ? "\n" : "  ";
    }
  }
  return text;
}

}  // namespace tessera
