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

TEST(Mixing, LeavesBatchesAloneUnlessAsked) {
  EXPECT_EQ(mixed({}, 1).targets.scalar_type(), at::kLong);
  EXPECT_THAT(message_of<UsageError>([] { mix(numbered, {.mixup = 0.2}); }), HasSubstr("give Mixing::classes"));
  EXPECT_THAT(message_of<UsageError>([] { mix(numbered, {.mixup = -1, .classes = 3}); }), HasSubstr("above 0"));
}

}  // namespace
}  // namespace tessera::testing::mixing_test
