// The random numbers of the device: its generator is one of libtorch's.
#include "tessera/base/error.h"
#include "tessera/xla/device/device.h"
#include "tessera/xla/device/random.h"
#include "tessera/xla/device/storage.h"
#include "tessera/xla/device/values.h"
#include "tessera/xla/graph/arithmetic.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::xla {
namespace {

at::Device two_replicas() {
  static const auto device = make_device({.devices = 2});
  return device;
}

std::vector<at::Tensor> drawn_on_device() { return replicas(torch::rand({8}, torch::TensorOptions(two_replicas()))); }

void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (size_t r = 0; r < 2; r++) EXPECT_TRUE(at::equal(a[r], b[r])) << r;
}

TEST(Random, ASeedBringsTheSameNumbers) {
  two_replicas();
  torch::manual_seed(5);
  const auto first = drawn_on_device(), second = drawn_on_device();
  EXPECT_FALSE(at::equal(first[0], second[0]));
  EXPECT_FALSE(at::equal(first[0], first[1]));
  torch::manual_seed(5);
  expect_equal(drawn_on_device(), first);
}

TEST(Random, AStateIsSavedAndRestored) {
  auto generator = at::globalContext().defaultGenerator(two_replicas());
  torch::manual_seed(7);
  drawn_on_device();
  const auto state = generator.get_state();
  EXPECT_TRUE(state.is_cpu());
  const auto expected = drawn_on_device();
  torch::manual_seed(8);
  generator.set_state(state);
  expect_equal(drawn_on_device(), expected);
  EXPECT_EQ(generator.current_seed(), 7U);
  auto other = generator.clone();
  const auto next = drawn_on_device();
  EXPECT_TRUE(at::equal(replicas(torch::rand({8}, other, torch::TensorOptions(two_replicas())))[1], next[1]));
  EXPECT_ANY_THROW(generator.set_state(torch::zeros({8}, torch::kByte)));
}

// --- distributions ---

constexpr int64_t kMany = 1 << 17;  // a mean over two replicas is then exact to 0.01 deviations, which is five times the mean's own deviation

at::Tensor room(at::ScalarType type = at::kFloat) {
  return torch::empty({kMany}, torch::TensorOptions(two_replicas()).dtype(type));
}

/// Returns the numbers of all replicas on the CPU.
at::Tensor all_of(const at::Tensor& drawn) { return torch::cat(replicas(drawn)); }

void expect_distribution(const at::Tensor& numbers, double mean, double deviation) {
  const auto wide = numbers.to(at::kDouble);
  EXPECT_NEAR(wide.mean().item<double>(), mean, 0.01 * deviation);
  EXPECT_NEAR(wide.std().item<double>(), deviation, 0.03 * deviation);
}

double share(const at::Tensor& truths) { return truths.to(at::kDouble).mean().item<double>(); }
double least(const at::Tensor& drawn) { return drawn.min().item().toDouble(); }
double most(const at::Tensor& drawn) { return drawn.max().item().toDouble(); }

TEST(Distributions, OfNormalNumbers) {
  torch::manual_seed(1);
  for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    const auto drawn = all_of(room(type).normal_(3, 2));
    expect_distribution(drawn, 3, 2);
    const auto distance = ((drawn.to(at::kDouble) - 3) / 2).abs();
    EXPECT_NEAR(share(distance > 2), 0.0455, 0.005) << type;
    EXPECT_NEAR(share(distance > 4), 6.3e-5, 6.3e-5) << type;
  }
  expect_distribution(all_of(room().log_normal_(1, 0.5)).log(), 1, 0.5);
  const auto means = torch::arange(kMany, at::TensorOptions(two_replicas()).dtype(at::kFloat)).remainder(7);
  expect_distribution(all_of(at::normal(means, 2.0) - means), 0, 2);
}

TEST(Distributions, OfUniformNumbers) {
  torch::manual_seed(2);
  for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    const auto drawn = all_of(room(type).uniform_());
    const double step = type == at::kBFloat16 ? 0x1p-8 : type == at::kHalf ? 0x1p-11 : 0;
    expect_distribution(drawn, 0.5 - step / 2, std::sqrt(1 / 12.0));
    EXPECT_GE(least(drawn), 0) << type;
    EXPECT_LT(most(drawn), 1) << type;
  }
  expect_distribution(all_of(room().uniform_(-2, 4)), 1, 6 / std::sqrt(12.0));
}

TEST(Distributions, OfWaitingTimes) {
  torch::manual_seed(3);
  for (const auto type : {at::kFloat, at::kDouble, at::kHalf}) {
    const auto drawn = all_of(room(type).exponential_(2));
    expect_distribution(drawn, 0.5, 0.5);
    EXPECT_NEAR(share(drawn > 2), std::exp(-4), 0.002) << type;
    EXPECT_GT(least(drawn), 0) << type;
  }
  const auto tries = all_of(room().geometric_(0.25));
  expect_distribution(tries, 4, std::sqrt(12.0));
  EXPECT_EQ(least(tries), 1);
  const auto heavy = (all_of(room().cauchy_(1, 2)) - 1).abs();
  EXPECT_NEAR(share(heavy > 2), 0.5, 0.005);
  EXPECT_NEAR(share(heavy > 20), 2 * std::atan(0.1) / std::acos(-1), 0.003);
}

TEST(Distributions, OfWholeNumbers) {
  torch::manual_seed(4);
  const auto dice = all_of(room(at::kLong).random_(1, 7));
  expect_distribution(dice, 3.5, std::sqrt(35 / 12.0));
  for (int side = 1; side <= 6; side++) EXPECT_NEAR(share(dice == side), 1 / 6.0, 0.005) << side;
  expect_distribution(all_of(room(at::kByte).random_()), 127.5, 256 / std::sqrt(12.0));
  EXPECT_EQ(most(all_of(room(at::kBFloat16).random_())), 256);
  EXPECT_THROW(room(at::kLong).random_(5, 5), std::exception);
  const auto order = torch::randperm(1000, at::TensorOptions(two_replicas()).dtype(at::kLong)).cpu();
  EXPECT_FALSE(at::equal(order, torch::arange(1000)));
  EXPECT_TRUE(at::equal(std::get<0>(order.sort()), torch::arange(1000)));
}

TEST(Distributions, OfChoices) {
  torch::manual_seed(5);
  expect_distribution(all_of(room().bernoulli_(0.3)), 0.3, std::sqrt(0.21));
  const auto weights = torch::tensor({1.0F, 0.0F, 3.0F, 4.0F}).to(two_replicas());
  const auto again = all_of(at::multinomial(weights, kMany, /*replacement=*/true));
  const auto once = all_of(at::multinomial(weights.expand({kMany, 4}), 2));
  for (const auto& drawn : {again, once.select(1, 0)}) {
    EXPECT_NEAR(share(drawn == 0), 0.125, 0.005);
    EXPECT_EQ(share(drawn == 1), 0);
    EXPECT_NEAR(share(drawn == 2), 0.375, 0.005);
  }
  EXPECT_EQ(share(once.select(1, 0) == once.select(1, 1)), 0);
}

TEST(Distributions, OfWhatDropoutKeeps) {
  torch::manual_seed(6);
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const auto x = room(type).fill_(3).requires_grad_();
    const auto dropped = torch::dropout(x, 0.25, /*train=*/true);
    dropped.sum().backward();
    step_boundary();
    const auto values = all_of(dropped.detach());
    EXPECT_NEAR(share(values == 0), 0.25, 0.005) << type;
    EXPECT_EQ(share(values == 4), 1 - share(values == 0)) << type;
    EXPECT_TRUE(at::equal(all_of(x.grad()) != 0, values != 0)) << type;
  }
}

/// Bits that are all 0 or all 1, which come once in millions of draws.
TEST(Distributions, AreFiniteAtTheirEnds) {
  two_replicas();
  for (const auto element : {at::kUInt32, at::kUInt64}) {
    const auto zeros = hlo::broadcast(hlo::constant(int64_t{0}, element), {2}, {});
    for (const auto& bits : {zeros, hlo::unary("not", zeros)}) {
      auto inner = new_tensor(inner_from(bits)), normal = new_tensor(normal_from(bits));
      inner = inner.cpu(), normal = normal.cpu();
      EXPECT_GT(least(inner), 0);
      EXPECT_LT(most(inner), 1);
      EXPECT_GT(least(normal.abs()), 5);
      EXPECT_LT(most(normal.abs()), 9);
    }
  }
  const auto ones = hlo::unary("not", hlo::broadcast(hlo::constant(int64_t{0}, at::kUInt32), {2}, {}));
  for (const auto type : {at::kFloat, at::kHalf, at::kBFloat16}) EXPECT_LT(most(new_tensor(uniform_from(ones, type)).to(type).cpu()), 1) << type;
}

}  // namespace
}  // namespace tessera::xla
