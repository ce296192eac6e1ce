// Patterns match as in Oniguruma, and expressions that are not supported are refused.
#include "tessera/data/pattern.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/data/character_set.h"
#include "tessera/data/pre_tokenizer.h"
#include "tests/testing/transports.h"

namespace tessera::testing::pattern_test {
namespace {

using data::CharacterSet;
using data::Pattern;
using data::PreTokenizer;
using ::testing::HasSubstr;

using Pieces = std::vector<std::string>;

Pieces pieces(const std::string& pattern, const std::string& text) {
  std::vector<PreTokenizer::Step> steps;
  steps.push_back({.pattern = Pattern(pattern)});
  const PreTokenizer pre(std::move(steps));
  PreTokenizer::Scratch scratch;
  Pieces result;
  pre.each_word(text, PreTokenizer::Place::Begin, scratch, [&](std::string_view piece) { result.emplace_back(piece); });
  return result;
}

TEST(Pattern, MatchesWhatOnigurumaMatches) {
  const std::tuple<const char*, const char*, Pieces> all[] = {
      {"^.", "a\nb\n", {"a", "\n", "b", "\n"}},
      {"^", "a\nb\n", {"a\n", "b\n"}},
      {"$", "a\nb\n", {"a", "\nb", "\n"}},
      {"\\Z", "a\n", {"a", "\n"}},
      {"\\b", "ab cd", {"ab", " ", "cd"}},
      {"(?=b)", "abab", {"a", "ba", "b"}},
      {"x*", "axxb", {"a", "xx", "b"}},
      {"(?m:^.+)", "a\nb", {"a\nb"}},
      {"a{,2}", "aaaa", {"aa", "aa"}},
      {"a{2}?", "aaaa", {"aa", "aa"}},
      {"a{1,2}+b", "aaaab", {"aaaab"}},
      {"a{x", "a{x}", {"a{x", "}"}},
      {"a++a", "aaa", {"aaa"}},
      {"(?>a+)a", "aaa", {"aaa"}},
      {"a*?b", "aab", {"aab"}},
      {"(a|ab)(c|bcd)", "abcd", {"abcd"}},
      {"(?:a|ab)*c", "aababcab", {"aababc", "ab"}},
      {"(?=(?:\\d{3})+(?!\\d))", "1234567", {"1", "234", "567"}},
      {"(?<!\\S)b", "ab b", {"ab ", "b"}},
      {"(?<=a)b", "ab", {"a", "b"}},
      {"x(?i)a|B", "xAbB", {"xA", "bB"}},
      {"(?i:k|s)", "kK\u212As\u017F", {"k", "K", "\u212A", "s", "\u017F"}},
      {"\\x41\\x{42}\\u0043", "ABC", {"ABC"}},
      {"\\e\\a\\v\\f", "\x1b\a\v\f", {"\x1b\a\v\f"}},
      {"[a-z&&[^aeiou]&&[^x]]+", "abcxyz", {"a", "bc", "x", "yz"}},
      {"[^a&&b]", "ab", {"a", "b"}},
      {"[a-c-e]", "a-de", {"a", "-", "d", "e"}},
      {"[a-z[0-9]]+", "a1]", {"a1", "]"}},
      {"[[:alpha:][:^digit:]]", "a1 ", {"a", "1", " "}},
      {"[[:punct:]]", "$a+", {"$", "a", "+"}},
      {"\\p{Punct}", "$a-", {"$a", "-"}},
      {"\\p{^L}+", "a12b", {"a", "12", "b"}},
      {"\\p{ Uppercase_Letter }", "aA", {"a", "A"}},
      {"\\w", "\u00B2-", {"\u00B2", "-"}},
      {"[\\w]", "\u00B2-", {"\u00B2-"}},
      {"\\p{L}+", "\U0001E5D0\U00031350-", {"\U0001E5D0\U00031350", "-"}},  // of Unicode 15 and 16
      {"\\p{Han}+", "a\U0002EBF0\u4E2D", {"a", "\U0002EBF0\u4E2D"}},
  };
  for (const auto& [pattern, text, expected] : all) EXPECT_EQ(pieces(pattern, text), expected) << pattern;
}

TEST(Pattern, RefusesWhatItDoesNotRead) {
  const std::pair<const char*, const char*> all[] = {
      {"(", "missing closing parenthesis"},
      {"a)", "a closing parenthesis without an opening one"},
      {"*", "there is nothing to repeat"},
      {"{2}", "there is nothing to repeat"},
      {"a**", "a repetition of a repetition"},
      {"(?=a)+", "a repetition of a part that takes no characters"},
      {"(?:a?)*", "repeats a part that may take no characters"},
      {"a{3,1}", "limits are in the wrong order"},
      {"a{1001}", "more than 1000 times"},
      {"(?:(?:a{999}b){999}c){999}", "repeats too much"},
      {"(a)\\1", "\\1 is not read here"},
      {"\\R", "\\R is not read here"},
      {"(?<n>a)", "groups of the kind (?< are not read here"},
      {"(?x: a)", "the option x is not read here"},
      {"(?<=ab)c", "a lookbehind of more than one character"},
      {"(?i:\u00E9)", "only read of ASCII characters"},
      {"(?i:s(?:s))", "letters that one character can stand for"},
      {"[]", "an empty class"},
      {"[a", "it ends too early"},
      {"[a&&]", "&& without characters on both sides"},
      {"[\\d-z]", "begins with a class"},
      {"[a-\\d]", "ends with a class"},
      {"[z-a]", "ends before it begins"},
      {"[[:foo:]]", "there is no POSIX class [:foo:]"},
      {"[^\\s\\S]", "a class without a character"},
      {"\\p{Klingon}", "the property 'Klingon' of characters is not known here"},
      {"\\xff", "not an ASCII character"},
  };
  for (const auto& [pattern, why] : all) EXPECT_THAT(message_of<ConfigError>([&] { Pattern{pattern}; }), HasSubstr(why)) << pattern;
  EXPECT_THAT(message_of<Error>([&] { pieces("(?:a|aa)+b", std::string(60, 'a')); }), HasSubstr("'(?:a|aa)+b' takes too many tries"));
}

TEST(CharacterSets, AreSets) {
  const CharacterSet set({{U'x', U'z'}, {U'a', U'c'}, {U'd', U'e'}});
  EXPECT_EQ(set.ranges(), (std::vector<data::CharacterRange>{{U'a', U'e'}, {U'x', U'z'}}));
  EXPECT_EQ((~~set).ranges(), set.ranges());
  EXPECT_EQ((set & CharacterSet({{U'c', U'x'}})).ranges(), (std::vector<data::CharacterRange>{{U'c', U'e'}, {U'x', U'x'}}));
  EXPECT_TRUE(set.contains(U'e'));
  EXPECT_FALSE(set.contains(U'f'));
  EXPECT_FALSE(CharacterSet().contains(0));
  EXPECT_TRUE((~CharacterSet()).contains(CharacterSet::kLast));
  EXPECT_EQ(data::characters_named("no such"), std::nullopt);
}

}  // namespace
}  // namespace tessera::testing::pattern_test
