// A linear layer by one operator is sharded as any other.
#include "tessera/nn/linear.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tests/testing/transports.h"

namespace tessera::testing::linear_test {
namespace {

TEST(Linear, OfBfloat16IsSharded) {
  run_world({.transport = "threads", .ranks = 2}, [](const Communicator& world) {
    torch::nn::Linear layer(6, 4);
    fully_shard(layer, {.mesh = world, .mixed_precision = {.param_dtype = at::kBFloat16}, .start = Start::FromRank0});
    nn::linear(layer, at::ones({3, 6}, at::kBFloat16)).sum().backward();
    EXPECT_TRUE(at::equal(full_grad(layer->weight), at::full({4, 6}, 3.0)));
    EXPECT_TRUE(at::equal(full_grad(layer->bias), at::full({4}, 3.0)));
  });
}

TEST(Linear, OfBfloat16AndNoOutputsHasZerosAsGradients) {
  auto x = at::ones({3, 4}, at::kBFloat16).requires_grad_(), weight = at::ones({0, 4}, at::kBFloat16).requires_grad_();
  at::linear(x, weight).sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), at::zeros_like(x)));
  EXPECT_EQ(weight.grad().sizes(), weight.sizes());
}

}  // namespace
}  // namespace tessera::testing::linear_test
