#include "tessera/base/words.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <iterator>
#include <numeric>
#include <sstream>
#include <utility>

namespace tessera {
namespace {

std::string with_each_letter(std::string_view text, int (*change)(int)) {
  std::string result(text);
  std::ranges::transform(result, result.begin(), [&](unsigned char letter) { return change(letter); });
  return result;
}

}  // namespace

std::vector<std::string> words_in(const std::string& text) {
  std::istringstream all(text);
  return {std::istream_iterator<std::string>(all), {}};
}

std::string lower(std::string_view text) {
  return with_each_letter(text, std::tolower);
}

std::string upper(std::string_view text) {
  return with_each_letter(text, std::toupper);
}

std::string name_ranks(std::span<const int> ranks) {
  std::string result = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); i++) {
    if (i > 0) result += i + 1 == ranks.size() ? " and " : ", ";
    result += fmt::format("{}", ranks[i]);
  }
  return result;
}

std::string some_of(const std::vector<std::string>& names) {
  constexpr size_t kMostNames = 5;
  const auto shown = std::min(names.size(), kMostNames);
  const auto text = fmt::format("'{}'", fmt::join(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(shown), "', '"));
  return shown == names.size() ? text : fmt::format("{} and {} more", text, names.size() - shown);
}

std::string counted(int64_t number, std::string_view thing) {
  return fmt::format("{} {}{}", number, thing, number == 1 ? "" : "s");
}

std::string in_unit(double value, std::initializer_list<std::string_view> units) {
  const auto* unit = units.begin();
  for (; value >= 999.5 && unit + 1 < units.end(); unit++) value /= 1000;
  return value >= 999.5 ? fmt::format("{:.0f} {}", value, *unit) : fmt::format("{:.3g} {}", value, *unit);
}

std::string size_text(double bytes) {
  return in_unit(bytes, {"B", "kB", "MB", "GB", "TB"});
}

std::string duration_text(double seconds) {
  return in_unit(seconds * 1e6, {"us", "ms", "s"});
}

std::string printable(std::string_view text, std::string_view kept) {
  std::string result;
  for (size_t i = 0; i < text.size(); i++) {
    const auto byte = static_cast<unsigned char>(text[i]), next = static_cast<unsigned char>(i + 1 < text.size() ? text[i + 1] : 0);
    if (byte == 0xc2 && next >= 0x80 && next < 0xa0) {  // U+0080 to U+009F in UTF-8
      result += fmt::format("\\x{:02x}", next);
      i++;
    } else if ((byte < ' ' || byte == 0x7f) && kept.find(text[i]) == std::string_view::npos) {
      result += fmt::format("\\x{:02x}", byte);
    } else {
      result += text[i];
    }
  }
  return result;
}

bool is_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto at = [&](size_t place) { return static_cast<unsigned char>(text[place]); };
    const unsigned first = at(i++);
    const size_t more = first < 0x80 ? 0 : first >= 0xc2 && first < 0xe0 ? 1 : first >= 0xe0 && first < 0xf0 ? 2 : 3;
    if (more == 0) continue;
    if (first < 0xc2 || first > 0xf4 || text.size() - i < more) return false;
    const unsigned second = at(i);  // after some first bytes only part of the range is valid, so that every letter has one form
    const unsigned least = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80, most = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
    if (second < least || second > most) return false;
    for (size_t k = 1; k < more; k++) {
      if ((at(i + k) & 0xc0) != 0x80) return false;
    }
    i += more;
  }
  return true;
}

size_t edit_distance(std::string_view one, std::string_view other) {
  std::vector<size_t> row(other.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < one.size(); i++) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < other.size(); j++) {
      const size_t changed = diagonal + (one[i] == other[j] ? 0 : 1);
      diagonal = std::exchange(row[j + 1], std::min({row[j] + 1, row[j + 1] + 1, changed}));
    }
  }
  return row.back();
}

std::string nearest_name(std::string_view name, const std::vector<std::string>& known, std::string_view prefix) {
  const auto distance = [&](const std::string& other) { return edit_distance(name, other); };
  const auto nearest = std::ranges::min_element(known, {}, distance);
  const bool similar = nearest != known.end() && name.size() >= prefix.size() && distance(*nearest) <= (name.size() - prefix.size()) / 2;
  return similar ? *nearest : std::string();
}

}  // namespace tessera
