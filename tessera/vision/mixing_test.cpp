#include "tessera/vision/mixing.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "tessera/base/error.h"
#include "tests/testing/transports.h"

namespace tessera::testing::mixing_test {
namespace {

using ::testing::HasSubstr;
using vision::Draws;
using vision::mix;

constexpr int64_t kSamples = 4, kClasses = 5, kSize = 8;

/// Sample i is of the number i everywhere, and of class i.
data::Samples numbered(std::span<const int64_t> numbers, std::span<const uint64_t> /*seeds*/) {
  const auto labels = at::tensor(std::vector<int64_t>(numbers.begin(), numbers.end()));
  return {.inputs = labels.to(at::kFloat).view({-1, 1, 1, 1}).expand({-1, 3, kSize, kSize}).contiguous(), .targets = labels};
}

data::Samples mixed(const vision::Mixing& options, uint64_t seed) {
  std::vector<int64_t> numbers(kSamples);
  std::iota(numbers.begin(), numbers.end(), 0);
  std::vector<uint64_t> seeds(kSamples);
  std::iota(seeds.begin(), seeds.end(), seed);
  return mix(numbered, options)(numbers, seeds);
}

/// How much each sample has of itself, by its target.
at::Tensor shares_of(const at::Tensor& targets) {
  return targets.slice(1, 0, kSamples).diagonal();
}

TEST(Mixing, TargetsSayHowMuchOfEachSampleThereIs) {
  const auto own = at::arange(kSamples, at::kFloat), partner = own.roll(1);
  for (const auto& options : {vision::Mixing{.mixup = 0.4, .classes = kClasses}, {.cutmix = 1, .classes = kClasses}}) {
    for (uint64_t seed = 0; seed < 20; seed++) {
      const auto batch = mixed(options, seed);
      EXPECT_EQ(batch.targets.sizes(), (std::vector<int64_t>{kSamples, kClasses}));
      EXPECT_TRUE(at::allclose(batch.targets.sum(1), at::ones({kSamples})));
      const auto share = shares_of(batch.targets);
      EXPECT_TRUE(at::allclose(batch.inputs.mean({1, 2, 3}), share * own + (1 - share) * partner, 1e-4, 1e-4));
    }
  }
}

TEST(Mixing, DrawsFromTheSeeds) {
  const vision::Mixing options{.mixup = 0.4, .cutmix = 1, .classes = kClasses};
  int cuts = 0;
  for (uint64_t seed = 0; seed < 40; seed++) {
    const auto batch = mixed(options, seed), again = mixed(options, seed), other = mixed(options, seed + 1);
    EXPECT_TRUE(at::equal(batch.inputs, again.inputs));
    EXPECT_TRUE(at::equal(batch.targets, again.targets));
    EXPECT_FALSE(at::equal(batch.inputs, other.inputs) && at::equal(batch.targets, other.targets));
    cuts += at::equal(batch.inputs, batch.inputs.round()) ? 1 : 0;
  }
  EXPECT_GT(cuts, 8);
  EXPECT_LT(cuts, 32);
}

TEST(Mixing, DrawsSharesFromTheBetaDistribution) {
  for (const double alpha : {0.01, 0.2, 1., 3.}) {
    Draws draws(1);
    constexpr int kCount = 20000;
    double sum = 0, squares = 0;
    for (int i = 0; i < kCount; i++) {
      const double share = vision::draw_lambda(alpha, draws);
      ASSERT_GE(share, 0);
      ASSERT_LE(share, 1);
      sum += share;
      squares += (share - 0.5) * (share - 0.5);
    }
    const double variance = 1 / (4 * (2 * alpha + 1));
    EXPECT_NEAR(sum / kCount, 0.5, 0.02) << alpha;
    EXPECT_NEAR(squares / kCount, variance, 0.05 * variance) << alpha;
  }
}

TEST(Mixing, TakesDamagedSamplesAsZeros) {
  const auto mixed = vision::mixup(at::ones({3, 3, 2, 2}), at::tensor({1, -100, 0}, at::kLong), 2, 0.75);
  EXPECT_TRUE(at::allclose(mixed.targets, at::tensor({0.25F, 0.75F, 0.F, 0.25F, 0.75F, 0.F}).view({3, 2})));
  const auto alone = vision::cutmix(at::ones({1, 3, 2, 2}), at::ones({1}, at::kLong), 2, {.height = 1, .width = 2});
  EXPECT_TRUE(at::equal(alone.targets, at::tensor({0.F, 1.F}).view({1, 2})));
}

TEST(Mixing, GivesRepeatsNoClass) {
  const auto last_batch = [](int64_t target) {
    data::Loader loader(data::Sampler({.size = 3, .global_batch = 2, .order = data::Order::AsStored, .tail = data::Tail::Fill}),
                        mix(numbered, {.mixup = 0.4, .classes = kClasses}), {.workers = 0, .target_of_repeats = target});
    loader.next();
    return loader.next()->targets;
  };
  EXPECT_TRUE(at::allclose(last_batch(0).sum(1), at::tensor({1.F, 0.F})));
  EXPECT_THAT(message_of<UsageError>([&] { last_batch(-100); }), HasSubstr("give 0, with which a row of shares of classes"));
}

TEST(Mixing, LeavesBatchesAloneUnlessAsked) {
  EXPECT_EQ(mixed({}, 1).targets.scalar_type(), at::kLong);
  EXPECT_THAT(message_of<UsageError>([] { mix(numbered, {.mixup = 0.2}); }), HasSubstr("give Mixing::classes"));
  EXPECT_THAT(message_of<UsageError>([] { mix(numbered, {.mixup = -1, .classes = 3}); }), HasSubstr("above 0"));
}

TEST(Mixing, NamesWhatIsWrong) {
  const auto expect = [](const auto& act, const std::string& part) { EXPECT_THAT(message_of<UsageError>(act), HasSubstr(part)); };
  Draws draws(1);
  const auto inputs = at::ones({2, 3, 4, 5}), labels = at::tensor({0, 7}, at::kLong);
  expect([&] { vision::mixup(inputs, labels, 7, 0.5); }, "the label 7 can't be mixed as one of 7 classes");
  expect([&] { vision::mixup(inputs, labels, 8, 1.5); }, "can't keep 1.5 of itself");
  expect([&] { vision::mixup(inputs, labels.to(at::kFloat), 8, 0.5); }, "with labels Float [2] can't be mixed");
  expect([&] { vision::cutmix(inputs, labels, 8, {.top = 2, .height = 3, .width = 3}); }, "no part of 3 by 3 at 2, 0");
  expect([&] { vision::draw_lambda(0, draws); }, "Beta(0, 0)");
}

}  // namespace
}  // namespace tessera::testing::mixing_test
