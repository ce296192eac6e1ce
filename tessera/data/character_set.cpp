#include "tessera/data/character_set.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <string>

namespace tessera::data {
namespace {

struct LongName {
  std::string_view name, category;
};
constexpr LongName kLongNames[] = {{"letter", "l"},
                                   {"mark", "m"},
                                   {"number", "n"},
                                   {"punctuation", "p"},
                                   {"punct", "p"},
                                   {"symbol", "s"},
                                   {"separator", "z"},
                                   {"other", "c"},
                                   {"uppercaseletter", "lu"},
                                   {"lowercaseletter", "ll"},
                                   {"titlecaseletter", "lt"},
                                   {"modifierletter", "lm"},
                                   {"otherletter", "lo"},
                                   {"nonspacingmark", "mn"},
                                   {"spacingmark", "mc"},
                                   {"enclosingmark", "me"},
                                   {"decimalnumber", "nd"},
                                   {"digit", "nd"},
                                   {"letternumber", "nl"},
                                   {"othernumber", "no"},
                                   {"connectorpunctuation", "pc"},
                                   {"dashpunctuation", "pd"},
                                   {"openpunctuation", "ps"},
                                   {"closepunctuation", "pe"},
                                   {"initialpunctuation", "pi"},
                                   {"finalpunctuation", "pf"},
                                   {"otherpunctuation", "po"},
                                   {"mathsymbol", "sm"},
                                   {"currencysymbol", "sc"},
                                   {"modifiersymbol", "sk"},
                                   {"othersymbol", "so"},
                                   {"spaceseparator", "zs"},
                                   {"lineseparator", "zl"},
                                   {"paragraphseparator", "zp"},
                                   {"control", "cc"},
                                   {"cntrl", "cc"},
                                   {"format", "cf"},
                                   {"surrogate", "cs"},
                                   {"privateuse", "co"},
                                   {"unassigned", "cn"}};

void add_ranges(const NamedCharacters& named, std::vector<CharacterRange>& ranges) {
  char32_t next = 0;
  bool is_inside = false;
  for (const char *c = named.lengths.data(), *end = c + named.lengths.size(); c != end;) {
    const auto number = [&] {
      uint32_t value = 0;
      c = std::from_chars(c, end, value).ptr;
      return value;
    };
    if (*c == ' ') c++;
    const bool is_number = std::isdigit(static_cast<unsigned char>(*c)) != 0;
    const auto length = static_cast<char32_t>(is_number ? number() : *c >= 'a' ? *c - 'a' + 1 : *c - 'A' + 27);
    if (!is_number) c++;
    uint32_t times = 1;
    if (c != end && *c == '*') {
      c++;
      times += number();
    }
    for (; times > 0; times--, is_inside = !is_inside) {
      if (is_inside) ranges.push_back({next, next + length - 1});
      next += length;
    }
  }
}

/// Returns the characters of all entries of the table whose names have this length and begin with `name`.
CharacterSet in_table(std::string_view name, size_t length) {
  std::vector<CharacterRange> ranges;
  for (const auto& named : kNamedCharacters) {
    if (named.name.size() == length && named.name.starts_with(name)) add_ranges(named, ranges);
  }
  return CharacterSet(std::move(ranges));
}

/// Returns the characters of the category with this name of one or two letters; empty if there is no such category.
CharacterSet of_category(std::string_view name) {
  if (name == "cn") return ~in_table("", 2);
  const auto listed = in_table(name, 2);
  return name == "c" ? listed | of_category("cn") : listed;
}

CharacterSet in_table(std::string_view name) {
  return in_table(name, name.size());
}

CharacterSet alphabetic() {
  return of_category("l") | of_category("nl") | in_table("alphabetic");
}

CharacterSet white_space() {
  return CharacterSet({{'\t', '\r'}, {0x85, 0x85}}) | of_category("z");
}

std::optional<CharacterSet> of_property(std::string_view name) {
  if (name == "any") return ~CharacterSet();
  if (name == "ascii") return CharacterSet({{0, 0x7F}});
  if (name == "alpha" || name == "alphabetic") return alphabetic();
  if (name == "alnum") return alphabetic() | of_category("nd");
  if (name == "upper" || name == "uppercase") return of_category("lu") | in_table("uppercase");
  if (name == "lower" || name == "lowercase") return of_category("ll") | in_table("lowercase");
  if (name == "word") return alphabetic() | of_category("m") | of_category("nd") | of_category("pc");
  if (name == "space" || name == "whitespace") return white_space();
  if (name == "blank") return of_category("zs") | CharacterSet('\t');
  if (name == "xdigit") return CharacterSet({{'0', '9'}, {'A', 'F'}, {'a', 'f'}});
  const auto graph = [] { return ~(white_space() | of_category("cc") | of_category("cn") | of_category("cs")); };
  if (name == "graph") return graph();
  if (name == "print") return graph() | of_category("zs");
  return std::nullopt;
}

}  // namespace

CharacterSet::CharacterSet(std::vector<CharacterRange> ranges) {
  std::ranges::sort(ranges, {}, &CharacterRange::first);
  for (const auto& range : ranges) {
    if (!ranges_.empty() && range.first <= ranges_.back().last + 1) {
      ranges_.back().last = std::max(ranges_.back().last, range.last);
    } else {
      ranges_.push_back(range);
    }
  }
}

bool CharacterSet::contains(char32_t character) const {
  const auto behind = std::ranges::upper_bound(ranges_, character, {}, &CharacterRange::first);
  return behind != ranges_.begin() && character <= std::prev(behind)->last;
}

CharacterSet operator|(const CharacterSet& left, const CharacterSet& right) {
  auto ranges = left.ranges_;
  ranges.insert(ranges.end(), right.ranges_.begin(), right.ranges_.end());
  return CharacterSet(std::move(ranges));
}

CharacterSet operator&(const CharacterSet& left, const CharacterSet& right) {
  return ~(~left | ~right);
}

CharacterSet operator~(const CharacterSet& set) {
  CharacterSet result;
  char32_t next = 0;
  for (const auto& range : set.ranges_) {
    if (range.first > next) result.ranges_.push_back({next, range.first - 1});
    next = range.last + 1;
  }
  if (next <= CharacterSet::kLast) result.ranges_.push_back({next, CharacterSet::kLast});
  return result;
}

std::optional<CharacterSet> characters_named(std::string_view name) {
  std::string plain;
  for (const char letter : name) {
    if (letter != ' ' && letter != '_' && letter != '-') plain += static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  }
  if (auto found = of_property(plain)) return found;
  if (const auto* found = std::ranges::find(kLongNames, plain, &LongName::name); found != std::end(kLongNames)) plain = found->category;
  auto found = plain.empty() || plain.size() > 2 ? in_table(plain) : of_category(plain);
  return found.ranges().empty() ? std::nullopt : std::optional(std::move(found));
}

}  // namespace tessera::data
