// Makes the table of keys in the guide to configurations.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "tessera/config/keys.h"
#include "tessera/config/value.h"
#include "tests/testing/folder.h"
#include "tests/testing/page.h"

namespace tessera::testing::page_test {
namespace {

using config::Key;
using config::Kind;

constexpr std::string_view kTableBegins = "<!-- The table is made by a test: TESSERA_TEST_WRITE_PAGES=1 ./check config/page -->\n";

std::string values(const Key& key) {
  const auto text = config::describe_values(key);
  return text.starts_with("one of ") ? text.substr(7) : text;
}

std::string code(std::string_view text) {
  return text.empty() ? "" : fmt::format("`{}`", text);
}

std::string meaning(const Key& key) {
  return key.reason.empty() ? std::string(key.meaning) : fmt::format("{}. Anything else is refused: {}", key.meaning, key.reason);
}

std::string table(config::Section section) {
  std::string text = "\n| key | values | unless given | variable | meaning |\n| --- | --- | --- | --- | --- |\n";
  for (const auto& key : config::keys()) {
    if (key.section != section || !has_effect(key)) continue;
    text += fmt::format("| {} | {} | {} | {} | {} |\n", code(key.name), values(key), code(key.otherwise), code(key.variable), meaning(key));
  }
  return text;
}

std::string table_without_effect() {
  std::string text = "\n| key | section | unless given | other values |\n| --- | --- | --- | --- |\n";
  for (const auto& key : config::keys()) {
    if (has_effect(key)) continue;
    text += fmt::format("| {} | {} | {} | {}: {} |\n", code(key.name), code(section_name(key.section)), code(key.otherwise),
                        key.effect == config::Effect::Refused ? "refused" : "no effect", key.reason);
  }
  return text;
}

TEST(ConfigurationPage, HasTheTableOfKeys) {
  using enum config::Section;
  std::string text = read_file(TESSERA_ROOT "/docs/tables/configuration-keys.md");
  const auto begin = text.find(kTableBegins);
  ASSERT_NE(begin, std::string::npos);
  text.resize(begin + kTableBegins.size());
  text += table(Top);
  for (const auto section : {Fsdp, Tessera, Parallelism}) text += fmt::format("\nUnder `{}`:\n{}", section_name(section), table(section));
  text += fmt::format("\nKeys of Accelerate that change nothing here:\n{}", table_without_effect());
  expect_page(TESSERA_ROOT "/docs/tables/configuration-keys.md", text, "config/page");
}

TEST(Keys, AreOfOnePiece) {
  std::set<std::string_view> names, variables;
  for (const auto& key : config::keys()) {
    EXPECT_TRUE(names.insert(key.name).second) << key.name;
    EXPECT_TRUE(key.variable.empty() || variables.insert(key.variable).second) << key.variable;
    EXPECT_EQ(has_effect(key), !key.meaning.empty()) << key.name;
    EXPECT_TRUE(has_effect(key) || !key.reason.empty()) << key.name;
    EXPECT_TRUE(key.section == config::Section::Top || key.name.starts_with(section_prefix(key.section))) << key.name;
    EXPECT_EQ(key.kind == Kind::Choice, !key.choices.empty()) << key.name;
    EXPECT_EQ(config::find_key(key.name)->name, key.name);
    if (key.kind != Kind::Text) {
      EXPECT_EQ(config::to_value(key, key.otherwise), key.otherwise);
    }
    for (const auto choice : key.choices) EXPECT_EQ(config::to_value(key, choice), choice);
  }
  EXPECT_GE(names.size(), 50);
}

}  // namespace
}  // namespace tessera::testing::page_test
