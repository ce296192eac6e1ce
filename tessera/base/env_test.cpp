// Also makes the page of environment variables.
#include "tessera/base/env.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "tessera/base/env_table.h"
#include "tessera/base/error.h"
#include "tests/testing/page.h"

namespace tessera::env_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Optional;

/// Sets a variable for as long as this object lives.
class Set {
 public:
  Set(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Set() { ::unsetenv(name_); }

 private:
  const char* name_;
};

template <class Error>
std::string message(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error came";
}

TEST(Environment, IsReadWithErrorsThatNameTheVariable) {
  const auto read = [](const char* value, int64_t high) {
    const Set set("TESSERA_TEST_NUMBER", value);
    return env_int("TESSERA_TEST_NUMBER", 0, high);
  };
  EXPECT_EQ(read("17", 20), 17);
  EXPECT_EQ(read("", 20), std::nullopt);
  EXPECT_EQ(env("TESSERA_TEST_NUMBER"), std::nullopt);
  for (const char* const wrong : {"17", "7x", "-1"}) {
    EXPECT_THAT(message<ConfigError>([&] { read(wrong, 10); }), HasSubstr(std::string("TESSERA_TEST_NUMBER='") + wrong + "'"));
  }
}

TEST(Environment, ChoosesAmongNames) {
  constexpr std::array<std::string_view, 2> kChoices = {"tea", "coffee"};
  const auto choose = [&] { return env_choice("TESSERA_TEST_CHOICE", kChoices); };
  EXPECT_EQ(choose(), std::nullopt);
  {
    const Set set("TESSERA_TEST_CHOICE", "coffee");
    EXPECT_EQ(choose(), 1);
  }
  const Set set("TESSERA_TEST_CHOICE", "Tea");
  EXPECT_THAT(message<ConfigError>([&] { choose(); }), HasSubstr("TESSERA_TEST_CHOICE='Tea' is unknown; choose one of tea, coffee"));
}

TEST(Environment, RefusesNamesThatAreNotInTheTable) {
  for (const auto& variable : env_table()) EXPECT_TRUE(is_known_env(variable.name));
  EXPECT_THAT(message<Error>([] { (void)env("TESSERA_TEA"); }), HasSubstr("TESSERA_TEA is not in the table"));
  EXPECT_EQ(env("TEA_OF_SOMEBODY_ELSE"), std::nullopt);
}

TEST(Environment, WarnsOfUnknownNames) {
  EXPECT_EQ(warning_of_unknown_env(), std::nullopt);
  const Set slip("TESSERA_RESIDENC", "gathered"), known("TESSERA_LOG", "info"), other("SOMEBODY_ELSE", "1");
  EXPECT_THAT(warning_of_unknown_env(), Optional(HasSubstr("TESSERA_RESIDENC (did you mean TESSERA_RESIDENCE?),")));
  EXPECT_THAT(warning_of_unknown_env(), Optional(AllOf(Not(HasSubstr("TESSERA_LOG")), Not(HasSubstr("SOMEBODY_ELSE")))));
  const Set far("TESSERA_XYZZY_OF_MINE", "1");
  EXPECT_THAT(warning_of_unknown_env(), Optional(HasSubstr("and TESSERA_XYZZY_OF_MINE,")));
  const Set swapped("TESSERA_TRANSPROT", "shm");
  const Set empty("TESSERA_TEA", "");
  EXPECT_THAT(warning_of_unknown_env(), Optional(Not(HasSubstr("TESSERA_TEA"))));
  EXPECT_THAT(warning_of_unknown_env(), Optional(HasSubstr("TESSERA_TRANSPROT (did you mean TESSERA_TRANSPORT?)")));
}

void write_table(std::ostream& text, bool for_tests) {
  text << "| variable | values | meaning | read by |\n| --- | --- | --- | --- |\n";
  for (const auto& variable : env_table()) {
    if (variable.for_tests != for_tests) continue;
    text << "| `" << variable.name << "` | " << variable.values << " | " << variable.meaning << " | " << variable.read_by << " |\n";
  }
}

std::string page() {
  std::ostringstream text;
  text << "# Environment variables\n\n"
          "All variables of Tessera itself. Any other variable whose name begins with `TESSERA_` has no effect: `tessera launch` and\n"
          "rank 0 print a warning that suggests the most similar name. An empty value counts as unset. The variables of launchers\n"
          "(`RANK`, `WORLD_SIZE`, ...) are described in [communication](../communication.md) and [launching](../launching.md), those of\n"
          "AWS in [checkpoints](../checkpoints.md#object-stores). This page is generated from `tessera/base/env_table.cpp` and, for the\n"
          "variables of keys, `tessera/config/keys.cpp`: `TESSERA_TEST_WRITE_PAGES=1 ./check base/env`.\n\n";
  write_table(text, false);
  text << "\n## For tests\n\n";
  write_table(text, true);
  return text.str();
}

TEST(EnvironmentPage, IsGeneratedFromTheTable) {
  testing::expect_page(TESSERA_ROOT "/docs/tables/environment.md", page(), "base/env");
}

}  // namespace
}  // namespace tessera::env_test
