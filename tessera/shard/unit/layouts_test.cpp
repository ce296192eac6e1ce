// Training has the same bits with every layout.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/optim/adam.h"
#include "tessera/shard/buffers.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/parameters.h"
#include "tests/testing/default_device.h"
#include "tests/testing/net.h"
#include "tests/testing/parity.h"
#include "tests/testing/residences.h"

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
    scale = register_parameter("scale", here(torch::tensor(1.5)));
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
  expect_parity(
      ranks, [] { return std::make_shared<Mixed>(); }, optimizer, 4,
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
                                            ::testing::ValuesIn(residences()), ::testing::Values(1, 2, 3)),
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

std::optional<int64_t> last_dim(const std::string& /*name*/, const at::Tensor& parameter) {
  return parameter.dim() > 1 ? std::optional<int64_t>(-1) : std::nullopt;
}

TEST(ShardDim, DividesParametersBetweenRowsOfThatDimension) {
  with_ranks(3, [](const Communicator& world) {
    torch::nn::Linear layer(5, 7);
    const auto before = layer->weight.detach().clone();
    fully_shard(layer, {.mesh = world, .start = Start::FromRank0, .layout = Layout::Rows, .shard_dim = last_dim});
    const auto info = *shard_info(layer->weight);
    EXPECT_THAT(info.shape, ElementsAre(7, 5));
    EXPECT_THAT(info.strides, ElementsAre(1, 7));
    ASSERT_EQ(info.slices.size(), 1U);
    const int64_t widths[] = {2, 2, 1};
    EXPECT_THAT(info.slices[0].offsets, ElementsAre(0, 2 * world.rank()));
    EXPECT_THAT(info.slices[0].sizes, ElementsAre(7, widths[world.rank()]));
    EXPECT_EQ(layer->weight.sizes(), (at::IntArrayRef{7, 5}));
    if (world.rank() == 0)
      EXPECT_TRUE(at::equal(full_parameter(layer->weight), before));
    else
      (void)full_parameter(layer->weight);
    EXPECT_THAT(shard_info(layer->bias)->slices[0].sizes, ElementsAre(world.rank() < 2 ? 3 : 1));
  });
}

TEST(ShardDim, TrainsAsReplicated) {
  for (const int ranks : {1, 2, 3, 4}) {  // of four ranks, the last one has no channel of a convolution with three
    for (const auto residence : residences()) {
      with_ranks(ranks, [&](const Communicator& world) {
        const auto make = [] { return std::make_shared<Mixed>(); };
        const auto optimizer = [](std::vector<at::Tensor> parameters) {
          return std::make_unique<torch::optim::SGD>(std::move(parameters), 0.1);
        };
        const auto expected = train(world, make, optimizer, 3);
        const auto actual = train(world, make, optimizer, 3, [&](const auto& model, const Communicator&) {
          const auto dim = [](const std::string& name, const at::Tensor& parameter) -> std::optional<int64_t> {
            if (name == "conv.weight") return 1;
            return last_dim(name, parameter);
          };
          fully_shard(*model, {.mesh = world, .residence = residence, .layout = Layout::Rows, .shard_dim = dim});
        });
        for (size_t i = 0; i < expected.parameters.size(); i++) {
          EXPECT_TRUE(at::allclose(actual.parameters[i], expected.parameters[i], 1e-4, 1e-6))
              << "parameter " << i << " of " << ranks << " ranks";
        }
      });
    }
  }
}

TEST(ShardDim, RefusesWhatIsNoDimensionAndOtherLayouts) {
  with_ranks(1, [](const Communicator& world) {
    Mixed model;
    const auto refused = [&](ShardOptions options) { return message_of<UsageError>([&] { fully_shard(model, options); }); };
    const auto dim = [](int64_t number) { return [number](const std::string&, const at::Tensor&) { return number; }; };
    EXPECT_THAT(refused({.mesh = world, .layout = Layout::Rows, .shard_dim = dim(2)}),
                HasSubstr("says 2 for parameter 'scale', which has 0 dimensions; return nothing for it"));
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(model.head, {.mesh = world, .layout = Layout::Rows, .shard_dim = dim(-3)}); }),
                HasSubstr("says -3 for parameter 'weight', which has 2 dimensions; choose one from -2 to 1"));
    for (const auto layout : {Layout::Flat, Layout::WholeParameters, Layout::Auto}) {
      EXPECT_THAT(refused({.mesh = world, .layout = layout, .shard_dim = last_dim}), HasSubstr("set that layout, or leave shard_dim out"));
    }
  });
}

TEST(ShardSizeMultiple, PadsTheChunkOfEachRank) {
  with_ranks(3, [](const Communicator& world) {
    const auto chunk = [&](int64_t multiple, Layout layout) {
      torch::nn::Linear layer(5, 7);
      fully_shard(layer, {.mesh = world, .start = Start::FromRank0, .layout = layout, .shard_size_multiple = multiple});
      return layer->weight.storage().nbytes() / sizeof(float) / 3;  // of the unsharded buffer
    };
    EXPECT_EQ(chunk(1, Layout::Auto), 32U);  // 35 values and 7, each from a multiple of 16 on
    EXPECT_EQ(chunk(128, Layout::Flat), 128U);
    EXPECT_EQ(chunk(24, Layout::Flat), 48U);
    const auto refused = [&](int64_t multiple, Layout layout) { return message_of<UsageError>([&] { (void)chunk(multiple, layout); }); };
    EXPECT_THAT(refused(0, Layout::Flat), HasSubstr("shard_size_multiple is 0; it is a number of values, at least 1"));
    EXPECT_THAT(refused(2, Layout::Rows), HasSubstr("pads the chunks of Layout::Flat"));
    EXPECT_THAT(refused(2, Layout::WholeParameters), HasSubstr("leave it at 1"));
  });
}

TEST(ShardSizeMultiple, TrainsToTheBitAsReplicated) {
  for (const int ranks : {2, 3}) {
    const auto optimizer = [](std::vector<at::Tensor> parameters) {
      return std::make_unique<torch::optim::SGD>(std::move(parameters), 0.1);
    };
    expect_parity(
        ranks, [] { return std::make_shared<Mixed>(); }, optimizer, 3,
        [](const auto& model, const Communicator& world) { fully_shard(*model, {.mesh = world, .shard_size_multiple = 1000}); });
  }
}

/// Unusual parameters and buffers: a scalar, two parameters without values, a complex one, and buffers that are not floats.
struct Odd : TrainedModel {
  at::Tensor scale, none, no_rows, complex;
  torch::nn::Linear head{nullptr};
  Odd() {
    scale = register_parameter("scale", here(torch::tensor(1.5)));
    none = register_parameter("none", torch::zeros({0}));
    no_rows = register_parameter("no_rows", torch::zeros({3, 0, 2}));
    complex = register_parameter("complex", torch::complex(torch::ones({3, 5}), torch::arange(15).view({3, 5}) * 0.1f));
    head = register_module("head", torch::nn::Linear(5, 3));
    register_buffer("steps", torch::full({3}, 7, torch::kLong));
    register_buffer("phase", torch::full({2}, c10::complex<float>(1, 2)));
  }
  at::Tensor loss(at::Generator& batches) override {
    const auto x = at::randn({4, 5}, batches);
    const auto turned = at::real(at::matmul(x.to(at::kComplexFloat), complex.t()));
    return (head(x) * scale + turned).pow(2).mean() + none.sum() + no_rows.sum();
  }
};

TEST(AnyLayout, HoldsScalarsAndEmptyAndComplexParameters) {
  for (const auto layout : {Layout::Flat, Layout::Rows, Layout::WholeParameters}) {
    for (const auto residence : residences()) {
      with_ranks(3, [&](const Communicator& world) {
        const auto make = [] { return std::make_shared<Odd>(); };
        const auto optimizer = [](std::vector<at::Tensor> parameters) {
          return std::make_unique<torch::optim::SGD>(std::move(parameters), 0.1);
        };
        const auto expected = train(world, make, optimizer, 3);
        const auto actual = train(world, make, optimizer, 3, [&](const auto& model, const Communicator&) {
          fully_shard(*model, {.mesh = world, .residence = residence, .layout = layout});
          // Buffers that are not floats keep their values and their dtype.
          sync_buffers(*model, world, BufferSync::Mean);
          EXPECT_TRUE(at::equal(model->named_buffers()["steps"], torch::full({3}, 7, torch::kLong)));
          EXPECT_TRUE(at::equal(model->named_buffers()["phase"], torch::full({2}, c10::complex<float>(1, 2))));
          EXPECT_EQ(shard_info(model->template as<Odd>()->no_rows)->shape, (std::vector<int64_t>{3, 0, 2}));
        });
        ASSERT_EQ(actual.parameters.size(), 6U);
        for (size_t i = 0; i < expected.parameters.size(); i++) {
          EXPECT_EQ(actual.parameters[i].sizes(), expected.parameters[i].sizes());
          EXPECT_TRUE(at::allclose(actual.parameters[i], expected.parameters[i], 1e-5, 1e-6)) << "parameter " << i;
        }
        EXPECT_FALSE(at::equal(actual.parameters[3], make()->complex)) << "the complex parameter did not train";
      });
    }
  }
}

}  // namespace
}  // namespace tessera::testing::layouts_test
