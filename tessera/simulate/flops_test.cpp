#include "tessera/simulate/flops.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/shard/activation.h"

namespace tessera::flops_test {
namespace {

using simulate::FlopCounter;

template <class Act>
double flops_of(const Act& act) {
  const FlopCounter counter;
  act();
  return counter.flops();
}

TEST(Flops, CountsForwardAndBackwardOfMatrices) {
  torch::nn::Linear layer(8, 16);
  const auto x = at::ones({4, 8}).requires_grad_();
  EXPECT_EQ(flops_of([&] { layer(x).sum().backward(); }), 3 * 2 * 4 * 8 * 16);
  EXPECT_EQ(flops_of([&] { at::bmm(at::ones({3, 4, 5}), at::ones({3, 5, 6})); }), 3 * 2 * 4 * 5 * 6);
  EXPECT_EQ(flops_of([&] { at::relu(x); }), 0);
}

TEST(Flops, CountsConvolutions) {
  torch::nn::Conv2d layer(torch::nn::Conv2dOptions(4, 6, 3).stride(2).padding(1).bias(false));
  const double forward = 2.0 * 6 * 4 * 9 * (5 * 5) * 2;  // two pictures of 9 x 9
  EXPECT_EQ(flops_of([&] { layer(at::ones({2, 4, 9, 9})); }), forward);
  EXPECT_EQ(flops_of([&] { layer(at::ones({2, 4, 9, 9}).requires_grad_()).sum().backward(); }), 3 * forward);
}

TEST(Flops, CountsAttention) {
  const auto x = at::ones({2, 3, 16, 8}).requires_grad_();
  const double product = 2.0 * 2 * 3 * 16 * 16 * 8;
  EXPECT_EQ(flops_of([&] { at::scaled_dot_product_attention(x, x, x).sum().backward(); }), 7 * product);
}

TEST(Flops, LeavesOutWhatASegmentComputesAgain) {
  torch::nn::Linear layer(8, 16);
  const auto x = at::ones({4, 8}).requires_grad_();
  EXPECT_EQ(flops_of([&] { activation::checkpoint(layer, x).sum().backward(); }), 3 * 2 * 4 * 8 * 16);
}

TEST(Flops, InnerCountersCountAlone) {
  const auto a = at::ones({4, 4});
  const FlopCounter outer;
  EXPECT_EQ(flops_of([&] { at::mm(a, a); }), 128);
  EXPECT_EQ(outer.flops(), 0);
  at::mm(a, a);
  EXPECT_EQ(outer.flops(), 128);
}

}  // namespace
}  // namespace tessera::flops_test
