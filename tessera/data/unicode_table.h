// Which characters are letters, numbers and so on, for cutting texts as Hugging Face's library does.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace tessera::data {

struct CharacterRange {
  char32_t first = 0, last = 0;
  bool operator==(const CharacterRange&) const = default;
};

/// Characters of one general category, up to where the next run begins.
struct CategoryRun {
  char32_t first;
  uint8_t category;  // its place in UnicodeTable::categories
};

struct NamedRanges {
  std::string_view name;  // in lower case
  std::span<const CharacterRange> ranges;
};

struct UnicodeTable {
  std::span<const CategoryRun> runs;             // of all characters, by their numbers
  std::span<const std::string_view> categories;  // "lu", "ll" ...
  std::span<const NamedRanges> beside;           // of Alphabetic, Uppercase and Lowercase, those of other categories than letters
  std::span<const NamedRanges> scripts;
};
extern const UnicodeTable kUnicodeTable;

}  // namespace tessera::data
