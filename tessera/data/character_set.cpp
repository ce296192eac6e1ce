#include "tessera/data/character_set.h"

#include <algorithm>
#include <array>
#include <cctype>
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

/// Of a category by its one or two letters; empty if there is none.
CharacterSet of_category(std::string_view name) {
  const auto& table = kUnicodeTable;
  std::vector<CharacterRange> ranges;
  for (size_t i = 0; i < table.runs.size(); i++) {
    if (!table.categories[table.runs[i].category].starts_with(name)) continue;
    ranges.push_back({table.runs[i].first, i + 1 < table.runs.size() ? table.runs[i + 1].first - 1 : CharacterSet::kLast});
  }
  return CharacterSet(std::move(ranges));
}

CharacterSet beside(std::string_view name) {
  const auto found = std::ranges::find(kUnicodeTable.beside, name, &NamedRanges::name);
  return CharacterSet(std::vector(found->ranges.begin(), found->ranges.end()));
}

CharacterSet alphabetic() {
  return of_category("l") | of_category("nl") | beside("alphabetic");
}

CharacterSet white_space() {
  return CharacterSet({{'\t', '\r'}, {0x85, 0x85}}) | of_category("z");
}

std::optional<CharacterSet> of_property(std::string_view name) {
  if (name == "any") return ~CharacterSet();
  if (name == "ascii") return CharacterSet({{0, 0x7F}});
  if (name == "alpha" || name == "alphabetic") return alphabetic();
  if (name == "alnum") return alphabetic() | of_category("nd");
  if (name == "upper" || name == "uppercase") return of_category("lu") | beside("uppercase");
  if (name == "lower" || name == "lowercase") return of_category("ll") | beside("lowercase");
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
  if (plain.size() == 1 || plain.size() == 2) {
    auto found = of_category(plain);
    return found.ranges().empty() ? std::nullopt : std::optional(std::move(found));
  }
  const auto script = std::ranges::find(kUnicodeTable.scripts, plain, &NamedRanges::name);
  if (script == kUnicodeTable.scripts.end()) return std::nullopt;
  return CharacterSet(std::vector(script->ranges.begin(), script->ranges.end()));
}

}  // namespace tessera::data
