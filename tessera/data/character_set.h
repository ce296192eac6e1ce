// Sets of Unicode characters, as the classes of regular expressions name them.
#pragma once

#include <optional>
#include <span>
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

  /// The ranges in ascending order. Between two of them lie characters outside the set.
  const std::vector<CharacterRange>& ranges() const { return ranges_; }
  bool contains(char32_t character) const;
  bool operator==(const CharacterSet&) const = default;

  friend CharacterSet operator|(const CharacterSet& left, const CharacterSet& right);
  friend CharacterSet operator&(const CharacterSet& left, const CharacterSet& right);
  friend CharacterSet operator~(const CharacterSet& set);

 private:
  std::vector<CharacterRange> ranges_;
};

/// The characters of a category of Unicode (L, Lu, uppercase_letter), a property (Alphabetic, Word, White_Space ...) or a script. Case,
/// spaces, - and _ in the name do not matter. Nothing for an unknown name.
std::optional<CharacterSet> characters_named(std::string_view name);

/// The characters of a category ("lu"), a script ("latin") or a property ("alphabetic"), by its name in lower case. The entry of a property
/// has only those of its characters that characters_named() does not add from categories. Unassigned characters ("cn") have no entry.
struct NamedCharacters {
  std::string_view name;
  /// Lengths of runs of characters from 0 on: the first run is outside of the set, the second inside, and so on. Lengths from 1 to 26 are
  /// written as a to z, from 27 to 52 as A to Z, and other lengths as decimal numbers, with a space between two numbers. a*57 means a and
  /// 57 more a.
  std::string_view lengths;
};
extern const std::span<const NamedCharacters> kNamedCharacters;

}  // namespace tessera::data
