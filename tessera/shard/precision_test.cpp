// MixedPrecision: unsharded parameters of lower precision than the shards.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/grad_scaler.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/call.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/training.h"
#include "tessera/shard/weight_operator.h"
#include "tests/testing/net.h"
#include "tests/testing/numbers.h"
#include "tests/testing/residences.h"

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
    auto x = input * 2;               // the result of an operator, because a program may fill an input itself anew
    std::vector<at::Tensor> results;  // their graphs keep the tensors from which they were computed
    const auto cast_of = [&](size_t head) {
      // addmm(bias, x, w.t()): the second edge leads to the function that made x.
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
    EXPECT_NE(cast_of(2), first);  // x has changed, so it is cast again
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

/// Layers of all kinds that libtorch has in float16 on CPUs.
struct Layers : nn::Module {
  nn::Embedding words = register_module("words", nn::Embedding(7, 8));
  nn::Conv1d conv = register_module("conv", nn::Conv1d(nn::Conv1dOptions(8, 8, 3).padding(1)));
  nn::BatchNorm1d batch_norm = register_module("batch_norm", nn::BatchNorm1d(8));
  nn::LayerNorm layer_norm = register_module("layer_norm", nn::LayerNorm(nn::LayerNormOptions({8})));
  nn::GroupNorm group_norm = register_module("group_norm", nn::GroupNorm(2, 8));
  nn::Linear linear = register_module("linear", nn::Linear(8, 8));
  Layers() { fill_with_numbers(*this); }
  at::Tensor forward(const at::Tensor& index) {
    const auto x = group_norm(batch_norm(conv(words(index).transpose(1, 2))));
    return linear(torch::tanh(layer_norm(x.transpose(1, 2))));
  }
};

TEST(Precision, TrainsInFloat16AsInFloat32) {
  with_ranks(2, [](const Communicator& world) {
    const auto train = [&](at::ScalarType dtype) {
      const auto model = std::make_shared<Layers>();
      fully_shard(model, {.mesh = world, .mixed_precision = {.param_dtype = dtype, .buffer_dtype = dtype}});
      optim::AdamW optimizer(parameters(*model), {.lr = 1e-2});
      optim::GradScaler scaler;
      std::vector<double> losses;
      const auto index = at::arange(10).remainder(7).view({2, 5}).add(world.rank()).remainder(7);
      for (int step = 0; step < 8; step++) {
        const auto loss = model->forward(index).to(at::kFloat).sub(0.5).pow(2).mean();
        losses.push_back(loss.item<double>());
        scaler.scale(loss).backward();
        scaler.step(optimizer);
        scaler.update();
        optimizer.zero_grad();
      }
      return losses;
    };
    const auto wide = train(at::kFloat), narrow = train(at::kHalf);
    EXPECT_LT(wide.back(), 0.8 * wide.front());
    for (size_t i = 0; i < wide.size(); i++) EXPECT_NEAR(narrow[i], wide[i], 0.02 * wide[i]);
  });
}

TEST(Precision, TrainsRecurrentLayersInFloat16) {
  with_ranks(2, [](const Communicator& world) {
    nn::LSTM lstm(nn::LSTMOptions(6, 4));
    fill_with_numbers(*lstm);
    fully_shard(lstm, {.mesh = world, .mixed_precision = {.param_dtype = at::kHalf}});
    const auto y = std::get<0>(lstm(numbers({3, 2, 6})));
    EXPECT_EQ(y.scalar_type(), at::kHalf);
    y.sum().backward();
    EXPECT_TRUE(full_grad(lstm->named_parameters()["weight_ih_l0"]).isfinite().all().item<bool>());
  });
}

/// Gradients of bfloat16 parameters that are kept in float32.
TEST(Precision, KeepsWideGradientsOfNarrowParameters) {
  with_ranks(2, [](const Communicator& world) {
    for (const auto residence : residences()) {
      for (const auto listing : {Listing::ByName, Listing::Flat}) {
        auto net = seeded_net(), plain = seeded_net();
        net->to(at::kBFloat16);
        plain->to(at::kBFloat16);
        fully_shard(net, {.mesh = world, .mixed_precision = {.grad_dtype = at::kFloat}, .listing = listing, .residence = residence});
        auto expected = at::zeros({10, 10});
        for (int pass = 0; pass < 6; pass++) {
          net(input(pass).to(at::kBFloat16)).pow(2).sum().backward();
          plain->zero_grad();
          plain(input(pass).to(at::kBFloat16)).pow(2).sum().backward();
          expected += plain->b->weight.grad().to(at::kFloat);
        }
        for (const auto& shard : parameters(*net)) {
          EXPECT_EQ(shard.scalar_type(), at::kBFloat16);
          EXPECT_EQ(shard.grad().scalar_type(), at::kFloat);
        }
        EXPECT_TRUE(at::equal(full_grad(net->b->weight), expected)) << "the sum of passes is not rounded";
        EXPECT_EQ(grad_norm(parameters(*net)).scalar_type(), at::kFloat);
        {
          const auto guard = full_params(*net, Access::Write, WithGradients::Yes);
          net->b->weight.grad().fill_(1 + 1.0 / 512);
        }
        EXPECT_EQ(full_grad(net->b->weight).max().item<float>(), 1 + 1.0F / 512);
        const auto before = full_parameter(net->b->weight);
        optim::SGD(parameters(*net), {.lr = 0.5}).step();
        EXPECT_TRUE(at::equal(full_parameter(net->b->weight), before - at::full_like(before, 0.5)));
      }
    }
    auto net = seeded_net();
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(net, {.mesh = world, .mixed_precision = {.grad_dtype = at::kBFloat16}}); }),
                ::testing::HasSubstr("grad_dtype BFloat16 can't hold the gradients of Float shards"));
  });
}

/// An evaluation in float32 of a model that computes in bfloat16.
TEST(Precision, EvaluatesInTheDtypeOfTheShards) {
  with_ranks(2, [](const Communicator& world) {
    for (const auto residence : residences()) {
      const ShardOptions options{.mesh = world, .mixed_precision = {.param_dtype = at::kBFloat16}, .residence = residence};
      auto net = seeded_net(), plain = seeded_net();
      for (const auto& child : net->children()) fully_shard(child, options);
      fully_shard(net, options);
      const auto narrow = call(net, input()).detach();
      {
        const torch::NoGradGuard no_grad;
        const auto exact = full_params(*net, Access::ReadStored);
        EXPECT_EQ(net->b->weight.scalar_type(), at::kFloat);
        EXPECT_TRUE(at::equal(call(net, input()), plain(input())));
        {
          const auto again = full_params(*net, Access::ReadStored);
          EXPECT_TRUE(at::equal(call(net, input()), plain(input())));
        }
        EXPECT_TRUE(at::equal(call(net, input()), plain(input())));
        EXPECT_THAT(message_of<UsageError>([&] { net->b->weight.zero_(); }), ::testing::HasSubstr("write inside tessera::full_params"));
      }
      {
        const auto writes = full_params(*net, Access::Write);
        const auto exact = full_params(*net, Access::ReadStored);
        const torch::NoGradGuard no_grad;
        EXPECT_TRUE(at::equal(call(net, input()), plain(input())));
      }
      {
        const torch::NoGradGuard no_grad;
        const auto of_a_part = full_params(*net->b, Access::Write);
        EXPECT_TRUE(at::allclose(call(net, input()).to(at::kFloat), plain(input()), 0.05, 0.05));
      }
      EXPECT_EQ(net->b->weight.scalar_type(), at::kBFloat16);
      const auto y = call(net, input());
      EXPECT_TRUE(at::equal(y, narrow));
      y.pow(2).sum().backward();
      optim::SGD(parameters(*net), {.lr = 0.5}).step();
      const auto exact = full_params(*net, Access::ReadStored);
      EXPECT_TRUE(at::equal(net->b->weight, full_parameter(parameters(*net)[2])));
    }
  });
}

struct Listed : torch::nn::Module {
  torch::nn::ParameterList list = register_module("list", torch::nn::ParameterList());
  Listed() { list->append(at::ones({5}).requires_grad_()); }
};

TEST(Precision, ShowsParametersOfListsInTheDtypeOfTheShards) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = std::make_shared<Listed>();
    fully_shard(model, {.mesh = world, .mixed_precision = {.param_dtype = at::kBFloat16}});
    const auto exact = full_params(*model, Access::ReadStored);
    EXPECT_EQ(model->list[0].scalar_type(), at::kFloat);
    EXPECT_EQ(full_state(*model).size(), 1);
    EXPECT_EQ(parameters(*model).size(), 1);
  });
}

TEST(Precision, OfTheShardsThatCanNotBeShownChangesNothing) {
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net();
    fully_shard(net, {.mesh = world, .mixed_precision = {.param_dtype = at::kBFloat16}});
    const torch::NoGradGuard no_grad;
    const auto outer = full_params(*net);
    if (world.rank() == 0) {
      EXPECT_THROW((void)full_params(*net, Access::ReadStored), CommError);
    } else {
      EXPECT_THROW(world.barrier(), CommError);
    }
    EXPECT_EQ(net->b->weight.scalar_type(), at::kBFloat16);
    const auto exact = full_params(*net, Access::ReadStored);
    EXPECT_EQ(net->b->weight.scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(net->b->weight, full_parameter(parameters(*net)[2])));
  });
}

TEST(Precision, OfTheShardsReplacesABatchNormAsUsual) {
  with_ranks(2, [](const Communicator& world) {
    nn::Sequential model(nn::Linear(3, 3), nn::BatchNorm1d(3));
    fully_shard(model, {.mesh = world, .mixed_precision = {.param_dtype = at::kBFloat16}, .start = Start::FromRank0});
    const auto norm = std::dynamic_pointer_cast<nn::BatchNorm1dImpl>(model->ptr(1));
    replace_weight_operator(norm->weight, [](std::string_view, std::span<const c10::IValue> arguments) -> std::optional<at::Tensor> {
      return arguments[0].toTensor() + 1;
    });
    const torch::NoGradGuard no_grad;
    const auto exact = full_params(*model, Access::ReadStored);
    const auto x = at::ones({2, 3});
    EXPECT_TRUE(at::equal(norm->forward(x), x + 1));
    EXPECT_EQ(norm->weight.scalar_type(), at::kFloat);
  });
}

TEST(Precision, ScalesGradientsBeforeTheyTakeTheDtypeOfTheParameters) {
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net();
    net->to(at::kHalf);
    fully_shard(net, {.mesh = world, .mixed_precision = {.grad_dtype = at::kFloat}});
    net(input().to(at::kHalf)).to(at::kFloat).pow(2).sum().backward();
    {
      const auto guard = full_params(*net, Access::Write, WithGradients::Yes);
      net->b->weight.grad().fill_(1e5);
    }
    const auto before = full_parameter(net->b->weight);
    optim::SGD optimizer(parameters(*net), {.lr = 0.5});
    optimizer.scale_gradients(torch::tensor(1e-5));
    optimizer.step();
    EXPECT_TRUE(at::allclose(full_parameter(net->b->weight), before - 0.5, 1e-2, 1e-3));
  });
}

}  // namespace
}  // namespace tessera::testing::precision_test
