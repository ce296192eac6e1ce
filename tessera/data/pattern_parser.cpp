// Reads regular expressions as the library Oniguruma does.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/data/pattern_program.h"
#include "tessera/data/unicode.h"

namespace tessera::data {
namespace {

using Kind = PatternNode::Kind;
using Mode = PatternNode::Mode;
using Anchor = PatternNode::Place;

constexpr size_t kLongest = 8192;      // characters
constexpr size_t kDeepest = 100;       // levels of groups within groups
constexpr size_t kMostTimes = 1000;    // the largest number in {n,m}
constexpr char32_t kEnd = 0xFFFFFFFF;  // what peek() returns after the last character

bool is_letter(char32_t character) {
  return (character >= U'a' && character <= U'z') || (character >= U'A' && character <= U'Z');
}

bool is_digit(char32_t character) {
  return character >= U'0' && character <= U'9';
}

class PatternParser {
 public:
  explicit PatternParser(const std::string& text) : text_(text), characters_(characters_of(text)) {}

  PatternNode parse() {
    if (characters_.size() > kLongest) throw ConfigError("a regular expression of more than {} characters is not read here", kLongest);
    auto node = choice({});
    if (peek() != kEnd) refuse("a closing parenthesis without an opening one");
    return node;
  }

 private:
  struct Options {
    bool ignores_case = false, dot_is_all = false;
  };

  [[noreturn]] void refuse(const std::string& why) const { throw ConfigError("the regular expression '{}': {}", text_, why); }

  char32_t peek(size_t ahead = 0) const { return at_ + ahead < characters_.size() ? characters_[at_ + ahead] : kEnd; }
  char32_t next() {
    if (peek() == kEnd) refuse("it ends too early");
    return characters_[at_++];
  }
  bool take(std::u32string_view expected) {
    if (!std::u32string_view(characters_).substr(at_).starts_with(expected)) return false;
    at_ += expected.size();
    return true;
  }

  PatternNode choice(Options options) {
    if (++depth_ > kDeepest) refuse("too many groups in groups");
    PatternNode alternatives{.kind = Kind::Choice};
    const auto before = last_letter_;
    do {
      last_letter_ = before;
      alternatives.parts.push_back(sequence(options));
    } while (take(U"|"));
    depth_--;
    return alternatives.parts.size() == 1 ? std::move(alternatives.parts.front()) : alternatives;
  }

  PatternNode sequence(Options options) {
    PatternNode result{.kind = Kind::Sequence};
    while (peek() != kEnd && peek() != U'|' && peek() != U')') {
      // Options such as (?i) hold for the rest of the group, with all its further alternatives.
      if (auto changed = options; isolated_options(changed)) {
        result.parts.push_back(choice(changed));
        break;
      }
      result.parts.push_back(repeated(atom(options)));
    }
    return result;
  }

  bool isolated_options(Options& options) {
    if (peek() != U'(' || peek(1) != U'?' || !(is_letter(peek(2)) || peek(2) == U'-')) return false;
    const auto begin = at_;
    at_ += 2;
    read_options(options);
    if (take(U")")) return true;
    at_ = begin;
    return false;
  }

  void read_options(Options& options) {
    bool on = true;
    for (; is_letter(peek()) || peek() == U'-'; at_++) {
      if (peek() == U'-') {
        on = false;
      } else if (peek() == U'i') {
        options.ignores_case = on;
      } else if (peek() == U'm') {
        options.dot_is_all = on;
      } else {
        refuse(fmt::format("the option {} is not read here", to_utf8({&characters_[at_], 1})));
      }
    }
  }

  PatternNode atom(Options options) {
    const auto before = std::exchange(last_letter_, 0);
    const auto character = next();
    switch (character) {
      case U'(':
        last_letter_ = before;  // so that expect_no_ligature() sees pairs of letters across the border of a group
        return group(options);
      case U'[':
        return set_of(char_class(options));
      case U'.':
        return set_of(options.dot_is_all ? ~CharacterSet() : ~CharacterSet('\n'));
      case U'^':
        return {.kind = Kind::Place, .place = Anchor::LineBegin};
      case U'$':
        return {.kind = Kind::Place, .place = Anchor::LineEnd};
      case U'*':
      case U'+':
      case U'?':
        refuse("there is nothing to repeat");
      case U'\\':
        return escape(options, before);
      case U'{': {
        at_--;
        if (PatternNode repeat; interval(repeat)) refuse("there is nothing to repeat");
        at_++;
        return literal(character, options, before);
      }
      default:
        return literal(character, options, before);
    }
  }

  static PatternNode set_of(CharacterSet set) { return {.kind = Kind::Set, .set = std::move(set)}; }

  PatternNode literal(char32_t character, Options options, char32_t before) {
    if (!options.ignores_case) return set_of(CharacterSet(character));
    const auto set = whatever_case(CharacterSet(character));
    last_letter_ = character | 0x20;
    expect_no_ligature(before, last_letter_);
    return set_of(set);
  }

  /// Refuses pairs of letters for which Oniguruma also accepts one character if case does not matter, such as ß for ss.
  void expect_no_ligature(char32_t first, char32_t second) const {
    const bool is_one =
        (first == U's' && (second == U's' || second == U't')) || (first == U'f' && (second == U'f' || second == U'i' || second == U'l'));
    if (is_one) refuse("(?i) of letters that one character can stand for (ss, st, ff, fi, fl) is not read here");
  }

  CharacterSet whatever_case(const CharacterSet& set) const {
    auto ranges = set.ranges();
    for (const auto& range : set.ranges()) {
      if (range.last >= 0x80) refuse("(?i) is only read of ASCII characters here");
      for (auto character = range.first; character <= range.last; character++) {
        if (!is_letter(character)) continue;
        ranges.push_back({character ^ 0x20, character ^ 0x20});
        if ((character | 0x20) == U'k') ranges.push_back({0x212A, 0x212A});  // the sign of Kelvin
        if ((character | 0x20) == U's') ranges.push_back({0x17F, 0x17F});    // ſ
      }
    }
    return CharacterSet(std::move(ranges));
  }

  PatternNode group(Options options) {
    struct Opening {
      std::u32string_view text;
      Kind kind;
      bool negative;
    };
    static constexpr Opening kOpenings[] = {{U"=", Kind::Ahead, false},
                                            {U"!", Kind::Ahead, true},
                                            {U">", Kind::Atomic, false},
                                            {U"<=", Kind::Behind, false},
                                            {U"<!", Kind::Behind, true}};
    PatternNode result{.kind = Kind::Sequence};
    if (take(U"?")) {
      const auto* known = std::ranges::find_if(kOpenings, [&](const Opening& opening) { return take(opening.text); });
      if (known != std::end(kOpenings)) {
        result.kind = known->kind, result.negative = known->negative;
      } else if (!take(U":")) {
        if (!is_letter(peek()) && peek() != U'-')
          refuse(fmt::format("groups of the kind (?{} are not read here", peek() == kEnd ? "" : to_utf8({&characters_[at_], 1})));
        read_options(options);
        if (!take(U":")) refuse("options without a : or a )");
      }
    }
    result.parts.push_back(choice(options));
    if (!take(U")")) refuse("missing closing parenthesis");
    if (result.kind != Kind::Behind) return result;
    const auto* seen = &result.parts.front();
    while (seen->kind == Kind::Sequence && seen->parts.size() == 1) seen = &seen->parts.front();
    if (seen->kind != Kind::Set) refuse("a lookbehind of more than one character is not read here");
    return {.kind = Kind::Behind, .set = seen->set, .negative = result.negative};
  }

  PatternNode escape(Options options, char32_t before) {
    static constexpr std::pair<char32_t, Anchor> kAnchors[] = {
        {U'A', Anchor::TextBegin}, {U'z', Anchor::TextEnd}, {U'Z', Anchor::LastLineEnd}, {U'b', Anchor::WordEdge}, {U'B', Anchor::InWord}};
    const auto letter = peek();
    const bool is_word = letter == U'w' || letter == U'W';  // outside of a class, \w has some more characters
    const auto* anchor = std::ranges::find(kAnchors, letter, &std::pair<char32_t, Anchor>::first);
    if (is_word || anchor != std::end(kAnchors)) at_++;
    if (is_word) return set_of(letter == U'w' ? word_characters() : ~word_characters());
    if (anchor != std::end(kAnchors)) return {.kind = Kind::Place, .place = anchor->second};
    if (auto set = escaped_set()) {
      if (options.ignores_case) refuse("(?i) is only read of ASCII characters here");
      return set_of(*std::move(set));
    }
    return literal(escaped_character(), options, before);
  }

  /// Reads an escaped set after its backslash, such as \s or \p{L}; nothing if the escape is not a set.
  std::optional<CharacterSet> escaped_set() {
    const auto letter = peek();
    const auto lower = letter | 0x20;
    static constexpr std::pair<char32_t, std::string_view> kSets[] = {{U's', "space"}, {U'd', "digit"}, {U'w', "word"}, {U'h', "xdigit"}};
    for (const auto& [known, name] : kSets) {
      if (lower != known || !is_letter(letter)) continue;
      at_++;
      auto set = *characters_named(name);
      return letter == lower ? set : ~set;
    }
    if ((letter != U'p' && letter != U'P') || peek(1) != U'{') return std::nullopt;
    at_ += 2;
    bool negative = letter == U'P';
    if (take(U"^")) negative = !negative;
    const auto end = characters_.find(U'}', at_);
    if (end == std::u32string::npos) refuse("missing } of a property");
    const auto name = to_utf8(std::u32string_view(characters_).substr(at_, end - at_));
    at_ = end + 1;
    auto set = characters_named(name);
    if (!set) refuse(fmt::format("the property '{}' of characters is not known here; write the ranges of its characters", name));
    return negative ? ~*set : *set;
  }

  char32_t escaped_character() {
    static constexpr std::u32string_view kControls = U"t\tn\nr\rf\fv\va\ae\x1B";  // pairs of a letter and its control character
    const auto letter = next();
    for (size_t i = 0; i < kControls.size(); i += 2) {
      if (letter == kControls[i]) return kControls[i + 1];
    }
    if (letter == U'u') return hexadecimal(4, 4);
    if (letter == U'x' && take(U"{")) {
      const auto character = hexadecimal(1, 8);
      if (!take(U"}")) refuse("missing } of \\x{");
      return character;
    }
    if (letter == U'x') {
      if (const auto byte = hexadecimal(1, 2); byte < 0x80) return byte;
      refuse("\\x of a byte that is not an ASCII character is not read here; write \\x{...}");
    }
    if (is_letter(letter) || is_digit(letter) || letter >= 0x80) refuse(fmt::format("\\{} is not read here", to_utf8({&letter, 1})));
    return letter;
  }

  char32_t hexadecimal(size_t least, size_t most) {
    uint64_t value = 0;
    size_t count = 0;
    for (; count < most; count++, at_++) {
      const char32_t digit = peek(), lower = digit | 0x20;
      if (is_digit(digit)) {
        value = value * 16 + (digit - U'0');
      } else if (digit != kEnd && lower >= U'a' && lower <= U'f') {
        value = value * 16 + (lower - U'a' + 10);
      } else {
        break;
      }
    }
    if (count < least || value > CharacterSet::kLast) refuse("a number that is not that of a character");
    return static_cast<char32_t>(value);
  }

  /// Reads a class after its opening bracket, up to the closing one.
  CharacterSet char_class(Options options) {
    if (++depth_ > kDeepest) refuse("too many classes in classes");
    const bool negative = take(U"^");
    if (peek() == U']') refuse("an empty class of characters, or one that begins with ]; write \\]");
    std::optional<CharacterSet> all;
    CharacterSet set;
    bool is_empty = true;
    const auto end_part = [&] {
      if (is_empty) refuse("&& without characters on both sides");
      if (options.ignores_case) set = whatever_case(set);
      all = all ? *all & set : set;
      set = {}, is_empty = true;
    };
    while (!take(U"]")) {
      if (take(U"&&")) {
        end_part();
        continue;
      }
      set = set | class_item(is_empty, options);
      is_empty = false;
    }
    end_part();
    depth_--;
    if (negative) all = ~*all;
    // Oniguruma reads some empty classes as other sets.
    if (all->ranges().empty()) refuse("a class without a character");
    return *std::move(all);
  }

  CharacterSet class_item(bool is_first, Options options) {
    if (take(U"[:")) return posix_class();
    if (take(U"[")) {
      // whatever_case() of the outer class would bring back letters that the inner class excludes.
      if (options.ignores_case) refuse("(?i) of a class in a class is not read here");
      return char_class(options);
    }
    const bool is_hyphen = peek() == U'-';
    if (peek() == U'\\') {
      at_++;
      if (auto set = escaped_set()) {
        if (peek() == U'-' && peek(1) != U']') refuse("a range of characters that begins with a class of characters");
        return *std::move(set);
      }
      return range_from(take(U"b") ? U'\b' : escaped_character());
    }
    const auto first = next();
    // A hyphen is an ordinary character at either end of a class and after a range.
    if (is_hyphen && !is_first) return CharacterSet(first);
    return range_from(first);
  }

  CharacterSet range_from(char32_t first) {
    if (peek() != U'-' || peek(1) == U']' || peek(1) == kEnd) return CharacterSet(first);
    if (peek(1) == U'&' && peek(2) == U'&') return CharacterSet(first);
    at_++;
    if (peek() == U'[') refuse("a range of characters that ends with a class of characters");
    auto last = next();
    if (last == U'\\') {
      if (escaped_set()) refuse("a range of characters that ends with a class of characters");
      last = take(U"b") ? U'\b' : escaped_character();
    }
    if (last < first) refuse("a range of characters that ends before it begins");
    return CharacterSet({{first, last}});
  }

  CharacterSet posix_class() {
    const bool negative = take(U"^");
    const auto end = characters_.find(U":]", at_);
    if (end == std::u32string::npos) refuse("missing :] of a POSIX class");
    const auto name = to_utf8(std::u32string_view(characters_).substr(at_, end - at_));
    at_ = end + 2;
    constexpr std::string_view kNames[] = {"alnum", "alpha", "ascii", "blank", "cntrl", "digit",  "graph",
                                           "lower", "print", "punct", "space", "upper", "xdigit", "word"};
    if (std::ranges::find(kNames, name) == std::end(kNames)) refuse(fmt::format("there is no POSIX class [:{}:]", name));
    auto set = *characters_named(name);
    if (name == "punct") set = set | *characters_named("symbol");
    return negative ? ~set : set;
  }

  PatternNode repeated(PatternNode node) {
    bool again = false;
    for (;;) {
      const bool is_interval = peek() == U'{';
      PatternNode repeat{.kind = Kind::Repeat};
      if (!quantifier(repeat)) return node;
      // A quantifier after another one is refused, except + after an interval and ? after {n}: these repeat the interval.
      if (again) refuse("a repetition of a repetition is not read here; write it with a group");
      if (node.kind == Kind::Ahead || node.kind == Kind::Behind || node.kind == Kind::Place)
        refuse("a repetition of a part that takes no characters");
      last_letter_ = 0;
      const bool is_fixed = is_interval && repeat.least == repeat.most;
      again = true;
      if (!is_interval && take(U"+")) {
        repeat.mode = Mode::Possessive;
      } else if (!is_fixed && take(U"?")) {
        repeat.mode = Mode::Lazy;
      } else if (is_interval && (peek() == U'+' || peek() == U'?')) {
        again = false;
      }
      repeat.parts.push_back(std::move(node));
      node = std::move(repeat);
    }
  }

  bool quantifier(PatternNode& repeat) {
    if (take(U"?")) {
      repeat.least = 0, repeat.most = 1;
    } else if (take(U"*")) {
      repeat.least = 0, repeat.most = kNoLimit;
    } else if (take(U"+")) {
      repeat.least = 1, repeat.most = kNoLimit;
    } else {
      return interval(repeat);
    }
    return true;
  }

  /// Reads {n}, {n,}, {,m} or {n,m}. Returns false for a brace that begins no interval and so is an ordinary character.
  bool interval(PatternNode& repeat) {
    const auto begin = at_;
    if (!take(U"{")) return false;
    const auto number = [&]() -> std::optional<size_t> {
      if (!is_digit(peek())) return std::nullopt;
      size_t value = 0;
      for (; is_digit(peek()); at_++) value = std::min<size_t>(value * 10 + (peek() - U'0'), kMostTimes + 1);
      if (value > kMostTimes) refuse(fmt::format("a repetition of more than {} times", kMostTimes));
      return value;
    };
    const auto least = number();
    const bool has_comma = take(U",");
    const auto most = has_comma ? number() : least;
    if ((!least && !most) || !take(U"}")) {
      at_ = begin;
      return false;
    }
    repeat.least = least.value_or(0);
    repeat.most = most.value_or(kNoLimit);
    if (repeat.least > repeat.most) refuse("a repetition whose limits are in the wrong order");
    return true;
  }

  const std::string& text_;
  const std::u32string characters_;
  size_t at_ = 0, depth_ = 0;
  char32_t last_letter_ = 0;  // the previous character if it is a letter whose case does not matter
};

}  // namespace

PatternNode parse_pattern(const std::string& text) {
  return PatternParser(text).parse();
}

CharacterSet word_characters() {
  return *characters_named("word") | CharacterSet({{0xB2, 0xB3}, {0xB9, 0xB9}, {0xBC, 0xBE}});
}

}  // namespace tessera::data
