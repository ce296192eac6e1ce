// Explanations why a step needed another program.
#include "tessera/xla/graph/difference.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/xla/graph/arithmetic.h"
#include "tessera/xla/graph/step_program.h"

namespace tessera::xla {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

Value argument(Sizes sizes) {
  return leaf(std::make_shared<Data>(), {at::kFloat, std::move(sizes)});
}

std::string text_of_program(const Value& value, const std::shared_ptr<const Data>& donor = nullptr) {
  return StepProgram({{value, donor}}).program().text;
}

std::string mean_of_rows(int64_t rows, const char* operation = "exponential", double number = 1) {
  const auto x = hlo::unary(operation, argument({rows, 4}));
  return text_of_program(hlo::sum(hlo::binary("multiply", x, hlo::fixed(x, number)), {0}));
}

TEST(Difference, NamesTheFirstOperationThatIsAnother) {
  EXPECT_EQ(first_difference(mean_of_rows(3, "log"), mean_of_rows(3)).text, "in operation 0, which is log and was exponential");
}

TEST(Difference, NamesShapes) {
  EXPECT_EQ(
      first_difference(mean_of_rows(3), mean_of_rows(8)).text,
      "in operation 0, exponential: its types are (tensor<3x4xf32>) -> tensor<3x4xf32>, which were (tensor<8x4xf32>) -> tensor<8x4xf32>");
}

TEST(Difference, NamesConstants) {
  EXPECT_THAT(first_difference(mean_of_rows(3, "log", -1), mean_of_rows(3, "log", 1)).text,
              HasSubstr("in operation 1, constant: its attributes are value = dense<-1.0"));
}

TEST(Difference, NamesOperands) {
  const auto a = argument({4}), b = argument({4});
  EXPECT_EQ(first_difference(text_of_program(hlo::binary("add", a, b)), text_of_program(hlo::binary("add", a, a))).text,
            "in operation 0, add: its operands are %a0, %a1, which were %a0, %a0");
}

TEST(Difference, NamesArgumentsThatAreDonated) {
  const auto data = std::make_shared<Data>();
  const auto value = hlo::unary("log", leaf(data, {at::kFloat, {4}}));
  EXPECT_EQ(first_difference(text_of_program(value, data), text_of_program(value)).text,
            "in argument 0, which is %a0: tensor<4xf32> {tf.aliasing_output = 0 : i32} and was %a0: tensor<4xf32>");
}

TEST(StepHistory, TellsOfAThirdProgramAndOfEachPlaceOnce) {
  StepHistory history;
  EXPECT_EQ(history.add(0, mean_of_rows(8)), std::nullopt);
  EXPECT_EQ(history.add(1, mean_of_rows(7)), std::nullopt);
  EXPECT_THAT(history.add(2, mean_of_rows(6)).value_or(""), HasSubstr("a step needs yet another program, its number 3"));
  EXPECT_EQ(history.add(3, mean_of_rows(5)), std::nullopt);
  EXPECT_THAT(history.add(4, mean_of_rows(5, "log")).value_or(""), HasSubstr("operation 0, which is log and was exponential"));
}

TEST(StepHistory, ComparesWithTheProgramWhoseOperationsAreAllEqual) {
  StepHistory history;
  const auto data = std::make_shared<Data>();
  const auto value = [&](const char* last) { return hlo::unary(last, hlo::unary("exponential", leaf(data, {at::kFloat, {4}}))); };
  EXPECT_EQ(history.add(0, text_of_program(value("log"))), std::nullopt);
  EXPECT_EQ(history.add(1, text_of_program(value("sqrt"))), std::nullopt);
  EXPECT_THAT(history.add(2, text_of_program(value("log"), data)).value_or(""), HasSubstr("in argument 0, which is "));
}

TEST(StepHistory, KnowsAStepByItsResultsAndArguments) {
  StepHistory history;
  for (int64_t size = 1; size < 6; size++)
    EXPECT_EQ(history.add(static_cast<size_t>(size), text_of_program(hlo::unary("log", argument({size})))), std::nullopt);
  const auto sum = [](int arguments) {
    auto all = argument({4});
    for (int i = 1; i < arguments; i++) all = hlo::binary("add", all, argument({4}));
    return text_of_program(hlo::unary("log", all));
  };
  for (int arguments = 1; arguments < 5; arguments++)
    EXPECT_EQ(history.add(static_cast<size_t>(5 + arguments), sum(arguments)), std::nullopt);
}

TEST(StepHistory, LetsAStepThatRunsOftenHaveAnotherProgram) {
  StepHistory history;
  EXPECT_EQ(history.add(0, mean_of_rows(8)), std::nullopt);
  for (int i = 0; i < 100; i++) history.ran(0);
  EXPECT_EQ(history.add(1, mean_of_rows(7)), std::nullopt);
  EXPECT_EQ(history.add(2, mean_of_rows(6)), std::nullopt);
}

TEST(StepHistory, CountsAProgramInPlaceOfAnotherOnce) {
  StepHistory history;
  EXPECT_EQ(history.add(0, mean_of_rows(8)), std::nullopt);
  EXPECT_EQ(history.add(1, mean_of_rows(7)), std::nullopt);
  history.replace(2, 1, mean_of_rows(7, "exponential", 2));
  EXPECT_THAT(history.add(3, mean_of_rows(6)).value_or(""), HasSubstr("its number 3"));
}

TEST(StepHistory, ForgetsAStepWhenSixteenOthersHaveHadNewerPrograms) {
  StepHistory history;
  EXPECT_EQ(history.add(0, mean_of_rows(8)), std::nullopt);
  EXPECT_EQ(history.add(1, mean_of_rows(7)), std::nullopt);
  for (int64_t size = 1; size <= 16; size++)
    EXPECT_EQ(history.add(static_cast<size_t>(size + 1), text_of_program(hlo::unary("log", argument({size + 10})))), std::nullopt);
  history.ran(1);
  EXPECT_EQ(history.add(18, mean_of_rows(6)), std::nullopt);  // its first program again
}

}  // namespace
}  // namespace tessera::xla
