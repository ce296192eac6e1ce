#include "tessera/optim/learning_rate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <utility>

#include "tessera/base/error.h"
#include "tests/testing/transports.h"

namespace tessera::optim::learning_rate_test {
namespace {

using Shape = LearningRate::Shape;

TEST(LearningRate, FollowsItsShape) {
  const LearningRate constant{.base = 0.5, .warmup = 4};
  EXPECT_DOUBLE_EQ(constant.at(0), 0.125);
  EXPECT_DOUBLE_EQ(constant.at(3), 0.5);
  EXPECT_DOUBLE_EQ(constant.at(1000), 0.5);
  const LearningRate steps{.base = 1, .shape = Shape::Steps, .factor = 0.5, .every = 10};
  EXPECT_DOUBLE_EQ(steps.at(9), 1);
  EXPECT_DOUBLE_EQ(steps.at(10), 0.5);
  EXPECT_DOUBLE_EQ(steps.at(29), 0.25);
  const LearningRate after{.base = 1, .shape = Shape::Steps, .warmup = 4, .factor = 0.5, .every = 10};
  const LearningRate of_run{.base = 1, .shape = Shape::StepsOfRun, .warmup = 4, .factor = 0.5, .every = 10};
  EXPECT_DOUBLE_EQ(of_run.at(1), 0.5);
  for (const auto& [step, rate] : {std::pair(9, 1.0), {10, 0.5}, {19, 0.5}, {20, 0.25}}) {
    EXPECT_DOUBLE_EQ(of_run.at(step), rate);
    EXPECT_DOUBLE_EQ(after.at(step + 4), rate);
  }
  const LearningRate cosine{.base = 1, .shape = Shape::Cosine, .warmup = 10, .steps = 110, .last = 0.2};
  EXPECT_DOUBLE_EQ(cosine.at(10), 1);
  EXPECT_NEAR(cosine.at(60), 0.6, 1e-12);
  EXPECT_DOUBLE_EQ(cosine.at(110), 0.2);
  EXPECT_DOUBLE_EQ(cosine.at(5000), 0.2);
  const LearningRate linear{.base = 1, .shape = Shape::Linear, .warmup = 10, .steps = 110, .last = 0.2};
  EXPECT_DOUBLE_EQ(linear.at(9), 1);
  EXPECT_DOUBLE_EQ(linear.at(10), 1);
  EXPECT_DOUBLE_EQ(linear.at(35), 0.8);
  EXPECT_DOUBLE_EQ(linear.at(110), 0.2);
  EXPECT_DOUBLE_EQ(linear.at(5000), 0.2);
}

TEST(LearningRate, SurvivesBeingSaved) {
  const LearningRate cosine{.base = 1.0 / 3, .shape = Shape::Cosine, .warmup = 10, .steps = 110, .last = 1e-9};
  EXPECT_EQ(LearningRate::load(cosine.save()), cosine);
  const LearningRate linear{.shape = Shape::Linear, .steps = 110};
  EXPECT_EQ(LearningRate::load(linear.save()), linear);
  EXPECT_THAT(testing::message_of<UsageError>([] { LearningRate::load("learning-rate-1 0.1"); }), ::testing::HasSubstr("not describe a learning rate"));
}

TEST(LearningRate, RefusesNonsense) {
  EXPECT_THROW((void)(LearningRate{.base = -1}.at(0)), UsageError);
  EXPECT_THROW((void)(LearningRate{.base = std::nan("")}.at(0)), UsageError);
  EXPECT_THROW((void)(LearningRate{.factor = std::nan("")}.at(0)), UsageError);
  EXPECT_THROW((void)(LearningRate{}.at(-1)), UsageError);
  EXPECT_THROW((void)(LearningRate{.shape = static_cast<Shape>(5)}.at(0)), UsageError);
  EXPECT_THROW((void)LearningRate::load(LearningRate{}.save() + " more"), UsageError);
  for (const auto& rate : {LearningRate{.shape = Shape::Cosine}, LearningRate{.shape = Shape::Cosine, .warmup = 5, .steps = 5},
                           LearningRate{.shape = Shape::Linear}, LearningRate{.shape = Shape::Linear, .warmup = 5, .steps = 5}}) {
    EXPECT_THAT(testing::message_of<UsageError>([&] { (void)rate.at(0); }), ::testing::HasSubstr("give .steps, the length of the run"));
  }
}

}  // namespace
}  // namespace tessera::optim::learning_rate_test
