// Random numbers depend only on their key and their position.
#include "tessera/shard/deferred/keyed_random.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace tessera::testing::keyed_random_test {
namespace {

using Draw = void (*)(const at::Tensor& values, double, double, uint64_t key, int64_t begin);

TEST(KeyedRandom, GivesAnyPartAsTheWhole) {
  for (const Draw draw : {Draw(&draw_uniform), Draw(&draw_normal)}) {
    const auto whole = at::empty({1001});
    draw(whole, 0, 1, 5, 0);
    for (const int64_t begin : {0, 1, 3, 4, 997}) {
      const auto part = at::empty({std::min<int64_t>(7, 1001 - begin)});
      draw(part, 0, 1, 5, begin);
      EXPECT_TRUE(at::equal(part, whole.narrow(0, begin, part.numel()))) << begin;
    }
    draw(at::empty({0}), 0, 1, 5, 0);
  }
}

TEST(KeyedRandom, HasTheDistributionThatIsAskedFor) {
  const auto values = at::empty({100'000}, at::kDouble);
  draw_uniform(values, -1, 3, 1, 0);
  EXPECT_GE(values.min().item<double>(), -1);
  EXPECT_LT(values.max().item<double>(), 3);
  EXPECT_NEAR(values.mean().item<double>(), 1, 0.02);
  draw_normal(values, 2, 0.5, 1, 0);
  EXPECT_NEAR(values.mean().item<double>(), 2, 0.01);
  EXPECT_NEAR(values.std().item<double>(), 0.5, 0.01);
}

TEST(KeyedRandom, DependsOnSeedNameAndCount) {
  EXPECT_EQ(key_of(1, "a", 0), key_of(1, "a", 0));
  EXPECT_NE(key_of(1, "a", 0), key_of(2, "a", 0));
  EXPECT_NE(key_of(1, "a", 0), key_of(1, "b", 0));
  EXPECT_NE(key_of(1, "a", 0), key_of(1, "a", 1));
}

}  // namespace
}  // namespace tessera::testing::keyed_random_test
