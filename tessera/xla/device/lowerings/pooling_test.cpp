// Maxima of windows that are as large as the plane, and of windows that are too large to be lowered, against the CPU.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/xla/metrics.h"
#include "tests/testing/xla_device.h"

namespace tessera::xla {
namespace {

/// Many equal values, of which the first is named, and a NaN, which is larger than all.
at::Tensor plane(int64_t side) {
  torch::manual_seed(1);
  auto x = torch::randint(0, 9, {2, 3, side, side}, torch::kFloat);
  x[1][0][side / 2][1] = NAN;
  return x;
}

using Pooled = std::tuple<at::Tensor, at::Tensor>;

void expect_pooled(const at::Tensor& x, const std::function<Pooled(const at::Tensor&)>& pool, size_t most_operations) {
  const auto expected = pool(x), actual = pool(x.to(device_for_tests()));
  EXPECT_TRUE(at::allclose(std::get<0>(actual).cpu(), std::get<0>(expected), 0, 0, /*equal_nan=*/true));
  EXPECT_TRUE(at::equal(std::get<1>(actual).cpu(), std::get<1>(expected)));
  EXPECT_LE(metrics().programs.back().operations, most_operations);
}

TEST(MaxPools, OfAllPlacesAreOneReduction) {
  (void)device_for_tests();
  const auto fell_back = metrics().fallbacks;
  for (const int64_t results : {1, 2, 7}) {
    expect_pooled(plane(28), [=](const at::Tensor& x) { return at::adaptive_max_pool2d(x, {results, results}); }, 60);
  }
  expect_pooled(plane(20), [](const at::Tensor& x) { return at::max_pool2d_with_indices(x, 20); }, 60);
  expect_pooled(plane(7).to(at::kLong), [](const at::Tensor& x) { return at::max_pool2d_with_indices(x, 7); }, 60);
  EXPECT_EQ(metrics().fallbacks, fell_back);
}

TEST(MaxPools, OfWideWindowsRunOnTheCpu) {
  (void)device_for_tests();
  const auto fell_back = metrics().fallbacks.size();
  expect_pooled(plane(40), [](const at::Tensor& x) { return at::max_pool2d_with_indices(x, 30); }, 10);
  expect_pooled(plane(40), [](const at::Tensor& x) { return at::adaptive_max_pool2d(x, {3, 1}); }, 10);
  EXPECT_EQ(metrics().fallbacks.size(), fell_back + 2);
}

}  // namespace
}  // namespace tessera::xla
