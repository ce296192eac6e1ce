// A product of bfloat16 that is computed in float32 has its values and gradients, rounded.
#include "tessera/nn/linear.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/testing/transports.h"

namespace tessera::testing::linear_test {
namespace {

TEST(WideProduct, IsTheProductRounded) {
  torch::manual_seed(1);
  const auto narrow = [](at::IntArrayRef sizes) { return at::randn(sizes).to(at::kBFloat16).requires_grad_(); };
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{5, 6}, {2, 3, 6}}) {
    for (const bool has_bias : {false, true}) {
      const auto x = narrow(sizes), weight = narrow({4, 6}), bias = narrow({4});
      const auto y = nn::wide_product(x, weight, has_bias ? std::optional(bias) : std::nullopt);
      const auto wide = [](const at::Tensor& values) { return values.detach().to(at::kFloat).requires_grad_(); };
      const auto a = wide(x), b = wide(weight), c = wide(bias);
      const auto z = at::linear(a, b, has_bias ? std::optional(c) : std::nullopt);
      EXPECT_EQ(y.scalar_type(), at::kBFloat16);
      EXPECT_TRUE(at::equal(y, z.to(at::kBFloat16)));
      const auto weights = at::randn(y.sizes()).to(at::kBFloat16);
      (y * weights).sum().backward();
      (z * weights.to(at::kFloat)).sum().backward();
      EXPECT_TRUE(at::allclose(x.grad().to(at::kFloat), a.grad(), 0.01, 0.01));
      EXPECT_TRUE(at::allclose(weight.grad().to(at::kFloat), b.grad(), 0.01, 0.01));
      EXPECT_TRUE(!has_bias || at::allclose(bias.grad().to(at::kFloat), c.grad(), 0.01, 0.01));
    }
  }
}

TEST(WideProduct, IsSharded) {
  run_world({.transport = "threads", .ranks = 2}, [](const Communicator& world) {
    torch::nn::Linear layer(6, 4);
    fully_shard(layer, {.mesh = world, .mixed_precision = {.param_dtype = at::kBFloat16}, .start = Start::FromRank0});
    nn::wide_product(at::ones({3, 6}, at::kBFloat16), layer->weight, layer->bias).sum().backward();
    EXPECT_TRUE(at::equal(full_grad(layer->weight), at::full({4, 6}, 3.0)));
    EXPECT_TRUE(at::equal(full_grad(layer->bias), at::full({4}, 3.0)));
  });
}

}  // namespace
}  // namespace tessera::testing::linear_test
