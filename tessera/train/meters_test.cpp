#include "tessera/train/meters.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tessera/base/error.h"
#include "tests/testing/transports.h"

namespace tessera::train::meters_test {
namespace {

TEST(Mean, WeighsBatchesByTheirSamples) {
  Mean mean;
  EXPECT_TRUE(std::isnan(mean.value()));
  mean.add(at::scalar_tensor(1.0), 30);
  mean.add(at::scalar_tensor(5.0), 10);
  mean.add(at::scalar_tensor(std::nan("")), 0);
  EXPECT_EQ(mean.value(), 2.0);
  EXPECT_EQ(mean.samples(), 40);
}

TEST(Mean, AddsInDouble) {
  Mean mean;
  for (int i = 0; i < 10000; i++) mean.add(at::scalar_tensor(0.1F).to(at::kBFloat16), 10000);
  EXPECT_NEAR(mean.value(), at::scalar_tensor(0.1F).to(at::kBFloat16).item<double>(), 1e-12);
}

TEST(Mean, HoldsNoGraph) {
  Mean mean;
  auto weight = at::ones({3}).requires_grad_();
  const auto nodes = weight.use_count();
  mean.add(weight.mul(2).mean(), 3);
  EXPECT_EQ(weight.use_count(), nodes);
  EXPECT_EQ(mean.value(), 2.0);
}

TEST(Mean, GoesOverTheSamplesOfAllRanks) {
  for (const auto& world : testing::talking_worlds()) {
    testing::run_world(world, [](const Communicator& ranks) {
      Mean mean;
      // Rank r has r samples of value r; rank 0 none.
      mean.add(at::scalar_tensor(static_cast<double>(ranks.rank())), ranks.rank());
      double sum = 0, samples = 0;
      for (int rank = 0; rank < ranks.size(); rank++) {
        sum += static_cast<double>(rank) * rank;
        samples += rank;
      }
      EXPECT_EQ(mean.value(ranks), sum / samples);
      EXPECT_TRUE(std::isnan(Mean().value(ranks)));
    });
  }
}

TEST(RunningMean, ForgetsWhatIsLongAgo) {
  RunningMean mean(3);
  EXPECT_EQ(mean.add(6), 6);
  EXPECT_EQ(mean.add(2), 4);
  EXPECT_TRUE(std::isnan(mean.add(std::nan(""))));
  EXPECT_TRUE(std::isnan(mean.add(1)));
  mean.add(2);
  EXPECT_EQ(mean.add(3), 2);
  EXPECT_THROW(RunningMean(0), UsageError);
}

TEST(Accuracy, IsTheShareOfRightOnes) {
  const auto scores = at::tensor({0.1, 0.9, 0.8, 0.2, 0.3, 0.7, 0.6, 0.4}).view({4, 2});
  EXPECT_EQ(accuracy(scores, at::tensor({1, 0, 1, 1}, at::kLong)).item<double>(), 0.75);
  EXPECT_EQ(accuracy(scores, at::tensor({1, 0, 1, 1}, at::kByte)).item<double>(), 0.75);
}

}  // namespace
}  // namespace tessera::train::meters_test
