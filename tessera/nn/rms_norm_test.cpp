// RMSNorm has the values and gradients of its formula, whatever the dtype, and its weight may be sharded.
#include "tessera/nn/rms_norm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tests/testing/transports.h"

namespace tessera::testing::rms_norm_test {
namespace {

constexpr double kEps = 1e-5;

at::Tensor formula(const at::Tensor& x, const at::Tensor& weight) {
  return x * (x.square().mean(-1, true) + kEps).rsqrt() * weight;
}

struct Result {
  at::Tensor y, of_x, of_weight;
};

Result result_of(const auto& norm, at::ScalarType dtype, at::IntArrayRef sizes) {
  torch::manual_seed(3);
  auto x = at::randn(sizes).to(dtype).requires_grad_(), weight = at::randn({sizes.back()}).to(dtype).requires_grad_();
  const auto y = norm(x, weight);
  y.mul(at::randn(sizes)).sum().backward();
  return {y.detach(), x.grad(), weight.grad()};
}

TEST(RmsNorm, HasTheValuesOfItsFormula) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{5}, {3, 1}, {70, 48}, {2, 3, 577}, {0, 4}}) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      const double tolerance = dtype == at::kDouble ? 1e-12 : dtype == at::kFloat ? 1e-4 : 0.1;
      const auto ours = result_of([](const auto& x, const auto& weight) { return nn::rms_norm(x, weight, kEps); }, dtype, sizes);
      const auto theirs =
          result_of([](const auto& x, const auto& weight) { return formula(x.to(at::kDouble), weight.to(at::kDouble)); }, dtype, sizes);
      const auto close = [&](const at::Tensor& a, const at::Tensor& b) {
        return at::allclose(a.to(at::kDouble), b.to(at::kDouble), tolerance, tolerance);
      };
      EXPECT_EQ(ours.y.scalar_type(), dtype);
      EXPECT_TRUE(close(ours.y, theirs.y)) << dtype << sizes;
      EXPECT_TRUE(close(ours.of_x, theirs.of_x)) << dtype << sizes;
      EXPECT_TRUE(close(ours.of_weight, theirs.of_weight)) << dtype << sizes << ours.of_weight << theirs.of_weight;
    }
  }
}

TEST(RmsNorm, TakesViewsAndOtherDtypesOfTheWeight) {
  const auto x = at::randn({6, 4, 32}).transpose(0, 1), weight = at::randn({32});
  EXPECT_TRUE(at::allclose(nn::rms_norm(x, weight, kEps), formula(x, weight), 1e-5, 1e-6));
  const auto mixed = nn::rms_norm(x.to(at::kBFloat16), weight, kEps);
  EXPECT_EQ(mixed.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at::allclose(mixed.to(at::kFloat), formula(x, weight), 0.02, 0.02));
}

TEST(RmsNorm, RefusesWeightsOfOtherSizes) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{3}, {8}, {1}, {4, 1}}) {
    EXPECT_THAT(message_of<UsageError>([&] {
                  nn::rms_norm(at::ones({2, 4}), at::ones(sizes), kEps);
                }),
                ::testing::HasSubstr("does not fit values of [2, 4]"));
  }
}

TEST(RmsNorm, HasTheSameBitsWithSeveralThreads) {
  const auto x = at::randn({300, 40}), weight = at::randn({40});
  const auto threads = at::get_num_threads();
  at::set_num_threads(1);
  const auto one = result_of([](const auto& a, const auto& b) { return nn::rms_norm(a, b, kEps); }, at::kFloat, {300, 40});
  at::set_num_threads(2);
  const auto two = result_of([](const auto& a, const auto& b) { return nn::rms_norm(a, b, kEps); }, at::kFloat, {300, 40});
  at::set_num_threads(threads);
  EXPECT_TRUE(at::equal(one.y, two.y));
  EXPECT_TRUE(at::equal(one.of_x, two.of_x));
  EXPECT_TRUE(at::equal(one.of_weight, two.of_weight));
}

TEST(RmsNorm, IsSharded) {
  run_world({.transport = "threads", .ranks = 2}, [](const Communicator& world) {
    nn::RmsNorm norm(7);
    {
      const torch::NoGradGuard no_grad;
      norm->weight.copy_(at::arange(1, 8));
    }
    const auto expected = formula(at::ones({2, 7}) * 3, at::arange(1, 8).to(at::kFloat));
    fully_shard(norm, {.mesh = world});
    const auto y = norm(at::ones({2, 7}) * 3);
    EXPECT_TRUE(at::allclose(y, expected));
    y.sum().backward();
    EXPECT_TRUE(at::allclose(full_grad(norm->weight), at::full({7}, 2.0), 1e-3));
  });
}

}  // namespace
}  // namespace tessera::testing::rms_norm_test
