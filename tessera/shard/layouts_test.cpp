// Training has the same bits with every layout.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/optim/adam.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/parameters.h"
#include "tessera/testing/net.h"
#include "tessera/testing/parity.h"

namespace tessera::testing::layouts_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Matrices, a convolution in channels_last, norms, a scalar, and a frozen part.
struct Mixed : TrainedModel {
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear head{nullptr}, frozen{nullptr};
  at::Tensor scale;

  Mixed() {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 5, 3)));
    norm = register_module("norm", torch::nn::BatchNorm2d(5));
    head = register_module("head", torch::nn::Linear(20, 7));
    frozen = register_module("frozen", torch::nn::Linear(7, 3));
    scale = register_parameter("scale", torch::tensor(1.5));
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
    for (auto& parameter : frozen->parameters()) parameter.set_requires_grad(false);
  }
  at::Tensor loss(at::Generator& batches) override {
    const auto x = torch::relu(norm(conv(at::randn({2, 3, 4, 4}, batches))));
    return frozen(head(x.reshape({2, -1})) * scale).pow(2).mean();
  }
};

using Case = std::tuple<Layout, Residence, int>;

class Layouts : public ::testing::TestWithParam<Case> {};

TEST_P(Layouts, TrainToTheBitAsReplicated) {
  const auto& [layout, residence, ranks] = GetParam();
  const auto optimizer = [](std::vector<at::Tensor> parameters) {
    return std::make_unique<torch::optim::AdamW>(std::move(parameters), torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
  };
  expect_parity(ranks, [] { return std::make_shared<Mixed>(); }, optimizer, 4,
                [layout = layout, residence = residence](const auto& model, const Communicator& world) {
                  const ShardOptions options{.mesh = world, .residence = residence, .layout = layout};
                  fully_shard(model->template as<Mixed>()->conv, options);
                  fully_shard(*model, options);
                });
}

std::string name_of(Layout layout) {
  return layout == Layout::Flat ? "Flat" : layout == Layout::Rows ? "Rows" : "WholeParameters";
}

INSTANTIATE_TEST_SUITE_P(OfParameters, Layouts,
                         ::testing::Combine(::testing::Values(Layout::Flat, Layout::Rows, Layout::WholeParameters),
                                            ::testing::Values(Residence::Gathered, Residence::NodeShared), ::testing::Values(1, 2, 3)),
                         [](const auto& info) {
                           return name_of(std::get<0>(info.param)) +
                                  (std::get<1>(info.param) == Residence::Gathered ? "Gathered" : "NodeShared") +
                                  std::to_string(std::get<2>(info.param));
                         });

/// The rows of a parameter that this rank has.
std::vector<int64_t> rows_here(const torch::nn::Module& module) {
  std::vector<int64_t> result;
  for (const auto& shard : parameters(module)) {
    const auto info = *shard_info(shard);
    const auto row = c10::multiply_integers(info.shape) / info.shape[0];
    EXPECT_EQ(info.numel % row, 0);
    result.push_back(info.numel / row);
  }
  return result;
}

TEST(Rows, AreDividedAsTorchChunkDoes) {
  with_ranks(3, [](const Communicator& world) {
    torch::nn::Linear layer(5, 7);
    fully_shard(layer, {.mesh = world, .start = Start::FromRank0, .layout = Layout::Rows});
    const std::vector<int64_t> expected[] = {{3, 3}, {3, 3}, {1, 1}};
    EXPECT_EQ(rows_here(*layer), expected[world.rank()]);
  });
}

TEST(WholeParameters, AreOnOneRankEach) {
  with_ranks(2, [](const Communicator& world) {
    torch::nn::Linear layer(5, 7);
    fully_shard(layer, {.mesh = world, .start = Start::FromRank0, .layout = Layout::WholeParameters});
    std::vector<int64_t> numels;
    for (const auto& shard : parameters(*layer)) numels.push_back(shard.numel());
    if (world.rank() == 0) {
      EXPECT_THAT(numels, ElementsAre(35, 0));
    } else {
      EXPECT_THAT(numels, ElementsAre(0, 7));
    }
  });
}

TEST(AnyLayout, HaveTheirOwnOptimizersNormsAndWholes) {
  for (const auto layout : {Layout::Rows, Layout::WholeParameters}) {
    with_ranks(3, [&](const Communicator& world) {
      auto net = seeded_net(), plain = seeded_net();
      fully_shard(net, {.mesh = world, .layout = layout});
      optim::AdamW sharded(parameters(*net), {.lr = 1e-2}), replicated(plain->parameters(), {.lr = 1e-2});
      for (int step = 0; step < 3; step++) {
        net(input()).pow(2).mean().backward();
        plain(input()).pow(2).mean().backward();
        EXPECT_TRUE(at::allclose(clip_grad_norm(parameters(*net), 0.1), clip_grad_norm(plain->parameters(), 0.1)));
        sharded.step();
        replicated.step();
        sharded.zero_grad();
        replicated.zero_grad();
      }
      const auto shards = parameters(*net), originals = plain->parameters();
      for (size_t i = 0; i < shards.size(); i++) EXPECT_TRUE(at::allclose(full_parameter(shards[i]), originals[i], 1e-5, 1e-6));
    });
  }
}

TEST(AnyLayout, RefuseAFlatListingThatTheyDoNotHave) {
  with_ranks(1, [](const Communicator& world) {
    torch::nn::Linear layer(5, 7);
    const ShardOptions options{.mesh = world, .listing = Listing::Flat, .layout = Layout::Rows};
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(layer, options); }), HasSubstr("only Layout::Flat has"));
  });
}

}  // namespace
}  // namespace tessera::testing::layouts_test
