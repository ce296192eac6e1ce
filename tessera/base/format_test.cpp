#include "tessera/base/format.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <vector>

#include "tessera/base/error.h"

namespace tessera::testing::format_test {
namespace {

TEST(Format, WritesValuesAsFmtDoes) {
  const auto alike = [](const auto& value) { EXPECT_EQ(formatted("<{}>", value), fmt::format("<{}>", value)); };
  alike(true);
  alike('x');
  alike(static_cast<int8_t>(-7));
  alike(static_cast<uint8_t>(200));
  alike(std::numeric_limits<int64_t>::min());
  alike(std::numeric_limits<uint64_t>::max());
  alike(0.1F);
  alike(0.1);
  alike(2.0);
  alike(1e300);
  alike(std::numeric_limits<double>::infinity());
  alike("text");
  alike(std::string("te{}xt"));
  alike(std::string_view("text").substr(1));
  EXPECT_EQ(formatted("{} is there", std::filesystem::path("a") / "b c"), "a/b c is there");
}

TEST(Format, CountsPlacesButNoBracesThatAreMeantAsSuch) {
  EXPECT_EQ(formatted("{{{}}} {:05} {:#x}", 1, 2, 255), "{1} 00002 0xff");
  EXPECT_EQ(formatted("{1} before {0}, and {1}", 1, 2), "2 before 1, and 2");
  EXPECT_STREQ(UsageError("{{}} is meant").what(), "{{}} is meant");  // without values it is plain text
  EXPECT_STREQ(UsageError("{} of {}", 1, std::string("x")).what(), "1 of x");
}

TEST(Format, JoinsARange) {
  EXPECT_EQ(joined(std::vector<int64_t>{2, 3}), "2, 3");
  EXPECT_EQ(joined(std::vector<std::string>{"a", "b"}, " and "), "a and b");
  EXPECT_EQ(joined(std::vector<int>()), "");
}

}  // namespace
}  // namespace tessera::testing::format_test
