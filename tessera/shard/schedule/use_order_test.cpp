// Learning and predicting the order of uses. Units are letters here, because UseOrder never dereferences them.
#include "tessera/shard/schedule/use_order.h"

#include <gtest/gtest.h>

#include <array>
#include <string>

namespace tessera::use_order_test {
namespace {

std::array<std::byte, 256> places;

Unit* unit_named(char letter) {
  return reinterpret_cast<Unit*>(&places[static_cast<size_t>(letter)]);
}

/// Records the uses; gives those that were not predicted.
std::string use(UseOrder& order, const std::string& uses) {
  std::string missed;
  for (const char letter : uses) {
    if (!order.record(unit_named(letter))) missed += letter;
  }
  return missed;
}

std::string to_come(const UseOrder& order) {
  std::string result;
  for (const auto* unit : order.to_come()) result += static_cast<char>(reinterpret_cast<const std::byte*>(unit) - places.data());
  return result;
}

void pass(UseOrder& order, const std::string& uses) {
  order.begin();
  use(order, uses);
  order.end();
}

TEST(UseOrder, PredictsAPassFromTheOneBefore) {
  UseOrder order(Pass::Training);
  order.begin();
  EXPECT_EQ(use(order, "abc"), "");
  EXPECT_EQ(to_come(order), "");
  order.end();
  order.begin();
  EXPECT_EQ(to_come(order), "abc");
  EXPECT_FALSE(order.is_predicted());
  use(order, "ab");
  EXPECT_EQ(to_come(order), "c");
  EXPECT_TRUE(order.is_predicted());
}

TEST(UseOrder, CountsOperatorsOfOneUnitAsOneUse) {
  UseOrder order(Pass::Training);
  pass(order, "aabbba");
  order.begin();
  EXPECT_EQ(to_come(order), "aba");
}

TEST(UseOrder, ReportsAPassThatGoesAnotherWayOnceAndLearnsIt) {
  UseOrder order(Pass::Training);
  pass(order, "abcd");
  order.begin();
  EXPECT_EQ(use(order, "acbd"), "c");
  EXPECT_EQ(to_come(order), "");
  order.end();
  order.begin();
  EXPECT_EQ(to_come(order), "acbd");
}

TEST(UseOrder, TakesTheSameForwardPassAgainForTheNextOfSeveral) {
  UseOrder order(Pass::Training);
  pass(order, "abc");
  order.begin();
  EXPECT_EQ(use(order, "abcabc"), "");
  EXPECT_EQ(use(order, "a"), "");
  EXPECT_EQ(to_come(order), "bc");
  // Accumulation does not make the recorded pass longer.
  use(order, "bc");
  order.end();
  order.begin();
  EXPECT_EQ(to_come(order), "abc");
}

TEST(UseOrder, KeepsTheRecordWhenAPassWasEmpty) {
  UseOrder order(Pass::Training);
  pass(order, "ab");
  pass(order, "");
  order.begin();
  EXPECT_EQ(to_come(order), "ab");
}

TEST(UseOrder, LearnsAPassWithoutEndWhenItHasComeTwice) {
  UseOrder order(Pass::Evaluation);
  order.begin();
  use(order, "abcab");
  EXPECT_EQ(to_come(order), "");
  use(order, "c");
  EXPECT_EQ(use(order, "a"), "");
  EXPECT_EQ(to_come(order), "bc");
}

TEST(UseOrder, TakesARepetitionInsideOfAPassForNoPass) {
  UseOrder order(Pass::Evaluation);
  order.begin();
  use(order, "xabab");
  EXPECT_EQ(to_come(order), "");
  EXPECT_FALSE(order.is_predicted());
}

TEST(UseOrder, KnowsThatTheLastUnitOfAPassMayBeTheFirstOfTheNext) {
  UseOrder order(Pass::Training);
  pass(order, "abca");
  order.begin();
  use(order, "abca");
  EXPECT_EQ(use(order, "bca"), "b");  // the first use of the next pass was the last of this one
  UseOrder evaluation(Pass::Evaluation);
  evaluation.begin();
  use(evaluation, "rabrrabrrabr");
  EXPECT_EQ(use(evaluation, "abr"), "");
}

TEST(UseOrder, ForgetsTheBeginningOfAPassWithoutEnd) {
  UseOrder order(Pass::Training);
  order.begin();
  std::string distinct;
  for (int i = 0; i < 5000; i++) use(order, std::string(1, static_cast<char>('a' + (i * i + i / 7) % 23)));
  order.end();
  order.begin();
  EXPECT_LE(order.to_come().size(), size_t{1} << 12);
  EXPECT_GT(order.to_come().size(), 0U);
}

}  // namespace
}  // namespace tessera::use_order_test
