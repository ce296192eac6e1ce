// MixedPrecision: unsharded parameters of lower precision than the shards.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/training.h"
#include "tessera/testing/net.h"

namespace tessera::testing::precision_test {
namespace {

namespace nn = torch::nn;

TEST(Precision, UsesNarrowParametersAndKeepsWideShards) {
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net();
    for (const auto& child : net->children()) fully_shard(child, {.mesh = world, .mixed_precision = {.param_dtype = at::kBFloat16}});
    auto narrow = seeded_net();
    narrow->to(at::kBFloat16);
    const auto y = net(input());
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(at::equal(y, narrow->forward(input().to(at::kBFloat16))));
    y.pow(2).sum().backward();
    narrow->forward(input().to(at::kBFloat16)).pow(2).sum().backward();
    const auto shards = parameters(*net);
    EXPECT_EQ(shards[0].scalar_type(), at::kFloat);
    EXPECT_EQ(shards[0].grad().scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(full_grad(shards[2]), narrow->b->weight.grad().to(at::kFloat)));
  });
}

TEST(Precision, CastsAnInputOncePerUnitAndVisit) {
  with_ranks(1, [](const Communicator& world) {
    nn::ModuleList heads(nn::Linear(8, 8), nn::Linear(8, 8), nn::Linear(8, 8));
    fully_shard(heads, {.mesh = world, .mixed_precision = {.param_dtype = at::kBFloat16}});
    auto input = at::ones({4, 8}).set_requires_grad(true);
    auto x = input * 2;               // what an operator made: an input itself may be filled anew by hand
    std::vector<at::Tensor> results;  // which keep what they were computed from
    const auto cast_of = [&](size_t head) {
      // addmm(bias, x, w.t()): the second edge leads to where its x came from.
      results.push_back(heads[head]->as<nn::Linear>()->forward(x));
      return results.back().grad_fn()->next_edge(1).function;
    };
    const auto first = cast_of(0);
    EXPECT_EQ(first->name(), "ToCopyBackward0");
    EXPECT_EQ(cast_of(1), first);
    {
      const torch::NoGradGuard no_grad;
      x.add_(1);
    }
    EXPECT_NE(cast_of(2), first);  // another value by now
  });
}

TEST(Precision, LeavesTheStatisticsOfBatchNormAlone) {
  with_ranks(2, [](const Communicator& world) {
    nn::BatchNorm1d norm(4);
    nn::BatchNorm1d reference(4);
    fully_shard(norm, {.mesh = world, .mixed_precision = {.param_dtype = at::kBFloat16}});
    const auto x = at::arange(20, at::kFloat).view({5, 4});
    norm(x);
    reference(x);
    EXPECT_TRUE(at::equal(norm->running_mean, reference->running_mean));
    EXPECT_TRUE(at::equal(norm->running_var, reference->running_var));
  });
}

}  // namespace
}  // namespace tessera::testing::precision_test
