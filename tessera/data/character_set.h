// Sets of Unicode characters, as the classes of regular expressions name them.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

namespace tessera::data {

struct CharacterRange {
  char32_t first = 0, last = 0;
  bool operator==(const CharacterRange&) const = default;
};

class CharacterSet {
 public:
  static constexpr char32_t kLast = 0x10FFFF;

  CharacterSet() = default;
  /// Ranges may come in any order and overlap.
  explicit CharacterSet(std::vector<CharacterRange> ranges);
  explicit CharacterSet(char32_t character) : ranges_{{character, character}} {}

  /// In order, with characters between each two that are not in it.
  const std::vector<CharacterRange>& ranges() const { return ranges_; }
  bool contains(char32_t character) const;
  bool operator==(const CharacterSet&) const = default;

  friend CharacterSet operator|(const CharacterSet& left, const CharacterSet& right);
  friend CharacterSet operator&(const CharacterSet& left, const CharacterSet& right);
  friend CharacterSet operator~(const CharacterSet& set);

 private:
  std::vector<CharacterRange> ranges_;
};

/// By a category of Unicode (L, Lu, uppercase_letter), a property (Alphabetic, Word, White_Space ...) or a script, whatever the case,
/// spaces,
/// - and _ in its name. Nothing for a name that is not known here.
std::optional<CharacterSet> characters_named(std::string_view name);

}  // namespace tessera::data
