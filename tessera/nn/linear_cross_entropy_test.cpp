// The loss in chunks is the plain one, forward and backward, and takes less memory than the scores.
#include "tessera/nn/linear_cross_entropy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tests/testing/transports.h"

namespace tessera::testing::linear_cross_entropy_test {
namespace {

at::Tensor plain(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& targets, const nn::LinearCrossEntropy& options) {
  const auto scores = nn::softcapped(at::linear(x, weight).flatten(0, -2), options.softcap), flat = targets.flatten();
  const auto counts = (flat != options.ignore_index).to(scores.scalar_type());
  const auto squares = (scores.logsumexp(-1).square() * counts).sum() / counts.sum();
  return at::cross_entropy_loss(scores, flat, {}, at::Reduction::Mean, options.ignore_index) + options.z_loss * squares;
}

TEST(LinearCrossEntropy, IsThePlainOne) {
  torch::manual_seed(1);
  for (const double z : {0.0, 0.01}) {
    for (const int64_t at_once : {0, 1, 4, 100}) {
      for (const auto dtype : {at::kDouble, at::kFloat}) {
        auto x = at::randn({2, 5, 6}, dtype).requires_grad_(), weight = at::randn({11, 6}, dtype).requires_grad_();
        auto targets = at::randint(0, 11, {2, 5}, at::kLong);
        targets[0][3] = targets[1][0] = -100;
        const nn::LinearCrossEntropy options{.softcap = at_once == 4 ? 1.5 : 0, .z_loss = z, .rows_at_once = at_once};
        const auto ours = nn::linear_cross_entropy(x, weight, targets, options) * 0.5, theirs = plain(x, weight, targets, options) * 0.5;
        const double tolerance = dtype == at::kDouble ? 1e-12 : 1e-5;
        EXPECT_TRUE(at::allclose(ours, theirs, tolerance, tolerance)) << ours << theirs;
        const auto kept = torch::autograd::grad({ours}, {x, weight}, {}, /*retain_graph=*/true),
                   mine = torch::autograd::grad({ours}, {x, weight}), other = torch::autograd::grad({theirs}, {x, weight});
        for (size_t i = 0; i < 2; i++) {
          EXPECT_TRUE(at::allclose(mine[i], other[i], tolerance, tolerance)) << at_once;
          EXPECT_TRUE(at::equal(kept[i], mine[i]));
        }
      }
    }
  }
}

TEST(LinearCrossEntropy, KnowsWhatNobodyAsksFor) {
  auto x = at::randn({4, 3}), weight = at::randn({5, 3}).requires_grad_();
  const auto targets = at::tensor({0, 4, -100, 2}, at::kLong);
  nn::linear_cross_entropy(x, weight, targets).backward();
  EXPECT_TRUE(weight.grad().defined());
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(nn::linear_cross_entropy(x, weight, targets).requires_grad());
  EXPECT_EQ(nn::linear_cross_entropy(x, weight, at::full({4}, -100, at::kLong)).item<float>(), 0);
  EXPECT_TRUE(at::allclose(nn::linear_cross_entropy(x, weight, at::tensor({7, 1, 7, 7}, at::kLong), {.ignore_index = 7}),
                           at::cross_entropy_loss(at::linear(x, weight), at::tensor({7, 1, 7, 7}, at::kLong), {}, at::Reduction::Mean, 7)));
  EXPECT_THAT(message_of<UsageError>([&] { nn::linear_cross_entropy(x, weight, at::zeros({3}, at::kLong)); }),
              ::testing::HasSubstr("values of the sizes [4, 3], a weight of [5, 3] and targets of [3] don't belong together"));
}

TEST(LinearCrossEntropy, IsDividedByWhatIsGiven) {
  auto x = at::randn({6, 3}).requires_grad_(), weight = at::randn({5, 3});
  const auto targets = at::tensor({0, 4, -100, 2, -100, 1}, at::kLong);
  const auto mean = nn::linear_cross_entropy(x, weight, targets), tenth = nn::linear_cross_entropy(x, weight, targets, {.divisor = at::tensor(40)});
  EXPECT_TRUE(at::allclose(tenth * 10, mean));
  EXPECT_TRUE(at::allclose(torch::autograd::grad({tenth}, {x})[0] * 10, torch::autograd::grad({mean}, {x})[0]));
}

TEST(LinearCrossEntropies, AreThoseOfEachRow) {
  torch::manual_seed(3);
  for (const int64_t at_once : {0, 4}) {
    auto x = at::randn({2, 5, 6}, at::kDouble).requires_grad_(), weight = at::randn({11, 6}, at::kDouble).requires_grad_();
    auto targets = at::randint(0, 11, {2, 5}, at::kLong);
    targets[0][3] = -100;
    const auto factors = at::randn({2, 5}, at::kDouble);
    const auto ours = nn::linear_cross_entropies(x, weight, targets, {.rows_at_once = at_once});
    const auto theirs = at::cross_entropy_loss(at::linear(x, weight).flatten(0, 1), targets.flatten(), {}, at::Reduction::None).view({2, 5});
    EXPECT_TRUE(at::allclose(ours, theirs, 1e-12, 1e-12));
    const auto mine = torch::autograd::grad({(ours * factors).sum()}, {x, weight}, {}, /*retain_graph=*/true),
               other = torch::autograd::grad({(theirs * factors).sum()}, {x, weight});
    for (size_t i = 0; i < 2; i++) EXPECT_TRUE(at::allclose(mine[i], other[i], 1e-12, 1e-12)) << at_once;
    EXPECT_THAT(message_of<UsageError>([&] { torch::autograd::grad({ours.sum()}, {x}, {}, true, /*create_graph=*/true); }),
                ::testing::HasSubstr("can't be differentiated again"));
  }
}

TEST(LinearCrossEntropy, AddsInFloat32InBfloat16) {
  torch::manual_seed(2);
  auto x = at::randn({300, 8}), weight = at::randn({40, 8}) / 3;
  const auto targets = at::randint(0, 40, {300}, at::kLong);
  auto narrow = x.to(at::kBFloat16).requires_grad_(), narrow_weight = weight.to(at::kBFloat16).requires_grad_();
  const auto ours = nn::linear_cross_entropy(narrow, narrow_weight, targets, {.rows_at_once = 7});
  EXPECT_EQ(ours.scalar_type(), at::kFloat);
  auto wide = narrow.detach().to(at::kFloat).requires_grad_(), wide_weight = narrow_weight.detach().to(at::kFloat).requires_grad_();
  const auto theirs = plain(wide, wide_weight, targets, {});
  EXPECT_NEAR(ours.item<double>(), theirs.item<double>(), 0.01);
  ours.backward();
  theirs.backward();
  EXPECT_EQ(narrow_weight.grad().scalar_type(), at::kBFloat16);
  EXPECT_LT((narrow_weight.grad().to(at::kFloat) - wide_weight.grad()).abs().max().item<double>(),
            0.02 * wide_weight.grad().abs().max().item<double>());
}

TEST(LinearCrossEntropy, OfNoRowsHasZerosAsGradients) {
  run_world({.transport = "threads", .ranks = 2}, [](const Communicator& world) {
    torch::nn::Linear head(torch::nn::LinearOptions(6, 10).bias(false));
    {
      const torch::NoGradGuard no_grad;
      head->weight.copy_(at::arange(60).view({10, 6}).to(at::kFloat) / 60);
    }
    const auto x = at::arange(18).view({3, 6}).to(at::kFloat) / 10, targets = at::tensor({1, 9, 0}, at::kLong);
    auto whole = head->weight.detach().clone().requires_grad_();
    plain(x, whole, targets, {}).backward();
    fully_shard(head, {.mesh = world});
    const int64_t rows = world.is_first() ? 3 : 0;
    const auto loss = nn::linear_cross_entropy(x.narrow(0, 0, rows), head->weight, targets.narrow(0, 0, rows));
    EXPECT_EQ(loss.item<float>() == 0, !world.is_first());
    loss.backward();
    EXPECT_TRUE(at::allclose(full_grad(head->weight), whole.grad() / 2, 1e-5, 1e-6));
  });
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{0, 6}, {2, 0, 6}, {0, 0}}) {
    auto x = at::ones(sizes).requires_grad_(), weight = at::ones({5, sizes.back()}).requires_grad_();
    nn::linear_cross_entropy(x, weight, at::zeros(at::IntArrayRef(sizes).slice(0, sizes.size() - 1), at::kLong)).backward();
    EXPECT_TRUE(at::equal(x.grad(), at::zeros_like(x)));
    EXPECT_TRUE(at::equal(weight.grad(), at::zeros_like(weight)));
  }
}

TEST(LinearCrossEntropy, IsSharded) {
  run_world({.transport = "threads", .ranks = 2}, [](const Communicator& world) {
    torch::nn::Linear head(torch::nn::LinearOptions(6, 10).bias(false));
    {
      const torch::NoGradGuard no_grad;
      head->weight.copy_(at::arange(60).view({10, 6}).to(at::kFloat) / 60);
    }
    const auto x = at::arange(24).view({4, 6}).to(at::kFloat) / 10, targets = at::tensor({1, 9, 0, 5}, at::kLong);
    auto whole = head->weight.detach().clone().requires_grad_();
    plain(x, whole, targets, {}).backward();
    fully_shard(head, {.mesh = world});
    nn::linear_cross_entropy(x, head->weight, targets, {.rows_at_once = 3}).backward();
    EXPECT_TRUE(at::allclose(full_grad(head->weight), whole.grad(), 1e-5, 1e-6));
    head->zero_grad();
    nn::linear_cross_entropies(x, head->weight, targets, {.rows_at_once = 3}).mean().backward();
    EXPECT_TRUE(at::allclose(full_grad(head->weight), whole.grad(), 1e-5, 1e-6));
  });
}

}  // namespace
}  // namespace tessera::testing::linear_cross_entropy_test
