// The strategies of PyTorch FSDP: their meshes, and training with each of them.
#include "tessera/shard/strategy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/comm/threads/run_ranks.h"
#include "tessera/shard/parameters.h"
#include "tests/testing/net.h"
#include "tests/testing/parity.h"

namespace tessera::testing::strategy_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// Units in a chain, with odd sizes, and a frozen part.
struct Chain : TrainedModel {
  torch::nn::Linear first{nullptr}, second{nullptr}, head{nullptr};
  Chain() {
    first = register_module("first", torch::nn::Linear(5, 7));
    second = register_module("second", torch::nn::Linear(7, 7));
    head = register_module("head", torch::nn::Linear(7, 3));
    second->bias.set_requires_grad(false);
  }
  at::Tensor loss(at::Generator& batches) override {
    return head(torch::tanh(second(torch::tanh(first(at::randn({4, 5}, batches)))))).pow(2).mean();
  }
};

class Strategies : public ::testing::TestWithParam<std::tuple<const char*, std::vector<int>>> {};

TEST_P(Strategies, TrainToTheBitAsReplicated) {
  const auto& [name, host_of] = GetParam();
  const auto make = [] { return std::make_shared<Chain>(); };
  const auto optimizer = [](std::vector<at::Tensor> parameters) {
    return std::make_unique<torch::optim::SGD>(std::move(parameters), torch::optim::SGDOptions(0.1).momentum(0.9));
  };
  run_ranks(static_cast<int>(host_of.size()),
            [&, name = name, host_of = host_of](const Communicator& world) {
              const auto expected = train(world, make, optimizer, 4);
              const auto actual = train(world, make, optimizer, 4, [&](const auto& model, const Communicator&) {
                const auto options = sharding_strategy(world, name);
                for (const auto& child : model->children()) fully_shard(child, options);
                fully_shard(*model, options);
              });
              // A mean of three ranks is rounded before it is added to another host's.
              const bool exact = host_of != std::vector<int>{0, 0, 0, 1, 1, 1} || !std::string(name).starts_with("HYBRID");
              const double within = exact ? 0 : 1e-6;
              for (size_t i = 0; i < expected.losses.size(); i++) EXPECT_NEAR(actual.losses[i], expected.losses[i], within);
              ASSERT_EQ(actual.parameters.size(), expected.parameters.size());
              for (size_t i = 0; i < expected.parameters.size(); i++) {
                EXPECT_TRUE(at::allclose(actual.parameters[i], expected.parameters[i], within, within)) << "parameter " << i;
              }
            },
            {.limit = kTestLimit, .host_of = host_of});
}

INSTANTIATE_TEST_SUITE_P(
    OnHosts, Strategies,
    ::testing::Combine(::testing::Values("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"),
                       ::testing::Values(std::vector<int>{0}, std::vector<int>{0, 0}, std::vector<int>{0, 1}, std::vector<int>{0, 0, 0},
                                         std::vector<int>{0, 0, 1, 1}, std::vector<int>{0, 1, 0, 1}, std::vector<int>{0, 0, 1, 1, 2, 2},
                                         std::vector<int>{0, 0, 0, 1, 1, 1})),
    [](const auto& info) {
      std::string hosts;
      for (const int host : std::get<1>(info.param)) hosts += std::to_string(host);
      return std::string(std::get<0>(info.param)) + "_" + hosts;
    });

TEST(Strategy, DecidesWhatARankKeeps) {
  run_ranks(4,
            [](const Communicator& world) {
              const auto numel_with = [&](ShardingStrategy strategy) {
                auto net = seeded_net();
                fully_shard(net, sharding_strategy(world, strategy));
                return shard_info(net->b->weight)->numel;
              };
              EXPECT_EQ(numel_with(ShardingStrategy::NoShard), 100);
              EXPECT_LT(numel_with(ShardingStrategy::FullShard), 100);
              const auto mesh = sharding_strategy(world, "_HYBRID_SHARD_ZERO2").mesh.value();  // PyTorch's name has the underscore
              EXPECT_EQ(mesh.shard().size(), 2);
              EXPECT_EQ(mesh.shard().topology().hosts(), 1);
            },
            {.host_of = {0, 0, 1, 1}});
}

TEST(Strategy, IsAReshardRuleToo) {
  with_ranks(2, [](const Communicator& world) {
    const auto keeps = [&](ShardingStrategy strategy, bool is_root) {
      return sharding_strategy(world, strategy).reshard_after_forward.keeps(is_root);
    };
    EXPECT_FALSE(keeps(ShardingStrategy::FullShard, /*is_root=*/false));
    EXPECT_TRUE(keeps(ShardingStrategy::FullShard, /*is_root=*/true));
    EXPECT_TRUE(keeps(ShardingStrategy::ShardGradOp, /*is_root=*/false));
    EXPECT_FALSE(keeps(ShardingStrategy::HybridShard, /*is_root=*/false));
    EXPECT_TRUE(keeps(ShardingStrategy::HybridShardZero2, /*is_root=*/false));
  });
}

TEST(Strategy, RefusesUnknownNamesAndUnevenHosts) {
  run_ranks(3,
            [](const Communicator& world) {
              EXPECT_THAT(message_of<UsageError>([&] { (void)sharding_strategy(world, "FULL_SHART"); }),
                          AllOf(HasSubstr("'FULL_SHART' is not a sharding strategy (did you mean FULL_SHARD?)"), HasSubstr("SHARD_GRAD_OP")));
              EXPECT_THAT(message_of<UsageError>([&] { (void)sharding_strategy(world, "zero"); }),
                          HasSubstr("'zero' is not a sharding strategy; there are"));
              EXPECT_THAT(message_of<UsageError>([&] { (void)sharding_strategy(world, "HYBRID_SHARD"); }), HasSubstr("host 1 has rank 2"));
            },
            {.host_of = {0, 0, 1}});
}

}  // namespace
}  // namespace tessera::testing::strategy_test
