// deferred_init: modules without memory, whose values are computed parameter by parameter.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>

#include "tessera/base/error.h"
#include "tessera/models/gpt.h"
#include "tessera/models/mlp.h"
#include "tessera/models/resnet.h"
#include "tessera/shard/deferred_init.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tests/testing/allocations.h"
#include "tests/testing/net.h"

namespace tessera::testing::deferred_init_test {
namespace {

using ::testing::HasSubstr;
using torch::nn::Module;

/// Ranks are threads of one process and share its generator.
std::mutex generator;

template <class Make>
auto seeded(const Make& make) {
  const std::lock_guard lock(generator);
  torch::manual_seed(3);
  return make();
}

std::map<std::string, at::Tensor> state_of(const Module& module) {
  std::map<std::string, at::Tensor> state;
  for (const auto& item : module.named_parameters()) state[item.key()] = item.value();
  for (const auto& item : module.named_buffers()) state[item.key()] = item.value();
  return state;
}

void expect_equal(const std::map<std::string, at::Tensor>& found, const std::map<std::string, at::Tensor>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    ASSERT_TRUE(found.contains(name)) << name;
    EXPECT_EQ(found.at(name).scalar_type(), tensor.scalar_type()) << name;
    EXPECT_EQ(found.at(name).strides(), tensor.strides()) << name;
    EXPECT_TRUE(at::equal(found.at(name).detach().cpu(), tensor.detach())) << name;
  }
}

/// Weight normalization, orthogonal and sparse weights, tied weights, views, a buffer that is computed, and a tensor that is neither.
struct Corners : Module {
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::LSTM lstm{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Embedding words{nullptr};
  at::Tensor gain, direction, low, table, mask, frequencies, chosen, written;
  Corners() {
    first = register_module("first", torch::nn::Linear(8, 8));
    second = register_module("second", torch::nn::Linear(8, 8));
    register_parameter("tied", first->weight);
    lstm = register_module("lstm", torch::nn::LSTM(8, 4));
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
    words = register_module("words", torch::nn::Embedding(torch::nn::EmbeddingOptions(9, 8).padding_idx(2)));
    torch::nn::init::orthogonal_(second->weight, 1.5);
    torch::nn::init::sparse_(lstm->all_weights()[0], 0.5);
    direction = register_parameter("direction", torch::randn({8, 8}));
    const auto v = direction.detach();
    gain = register_parameter("gain", v.norm(2, 1, true));
    low = register_parameter("low", torch::randn({16, 8}).slice(0, 4, 12).to(torch::kBFloat16));
    table =
        register_buffer("table", torch::outer(torch::arange(5, torch::kFloat), torch::arange(3).to(torch::kFloat).mul(-0.3).exp()).sin());
    mask = register_buffer("mask", torch::ones({4, 4}).triu(1).to(torch::kBool));
    frequencies = torch::pow(10000, -torch::arange(0, 8, 2).div(8.0));
    chosen = register_parameter("chosen", torch::full({3}, torch::randn({2}).sum().item<double>() > 0 ? 1.5 : 0.5));
    written = register_parameter("written", torch::zeros({2, 3}));
    torch::NoGradGuard no_grad;
    written[1].copy_(torch::tensor({1.5F, 2.5F, 3.5F}));
    written.add_(torch::tensor(std::vector<float>{1, 2, 3}));
    written[0][2] = 7;
    gain.masked_fill_(gain.gt(3), 3);
  }
};

struct Case {
  std::string name;
  std::function<std::shared_ptr<Module>()> make;
};

std::vector<Case> cases() {
  return {{"mlp", []() -> std::shared_ptr<Module> { return models::Mlp(models::MlpOptions{.width = 8, .layers = 3, .classes = 4}).ptr(); }},
          {"gpt",
           []() -> std::shared_ptr<Module> {
             return models::Gpt(models::GptOptions{.vocabulary = 40, .width = 16, .layers = 2, .heads = 2, .longest = 8}).ptr();
           }},
          {"resnet", []() -> std::shared_ptr<Module> { return models::ResNet(models::ResNetOptions::resnet50()).ptr(); }},
          {"transformer",
           [] {
             const auto layer = torch::nn::TransformerEncoderLayerOptions(16, 2).dim_feedforward(32);
             return torch::nn::TransformerEncoder(torch::nn::TransformerEncoderOptions(layer, 3)).ptr();
           }},
          {"corners", [] { return std::make_shared<Corners>(); }}};
}

TEST(DeferredInit, IsBitEqualToEagerConstruction) {
  for (const auto& [name, make] : cases()) {
    SCOPED_TRACE(name);
    torch::manual_seed(3);
    const auto eager = make();
    const auto next = torch::rand({3});
    torch::manual_seed(3);
    const auto deferred = deferred_init(make);
    EXPECT_TRUE(at::equal(torch::rand({3}), next));  // the generator has the same state as after eager construction
    for (const auto& parameter : deferred->parameters()) EXPECT_TRUE(parameter.is_meta());
    materialize(*deferred);
    expect_equal(state_of(*deferred), state_of(*eager));
    for (const auto& item : eager->named_parameters()) {
      EXPECT_EQ(deferred->named_parameters()[item.key()].requires_grad(), item.value().requires_grad());
    }
  }
}

TEST(DeferredInit, ShardsAreThoseOfTheEagerModule) {
  for (const auto& [name, make] : cases()) {
    SCOPED_TRACE(name);
    const auto expected = state_of(*seeded(make));
    for (const int ranks : {1, 2, 3}) {
      for (const auto layout : {Layout::Flat, Layout::Rows, Layout::WholeParameters}) {
        if (name == "resnet" && ranks != 2) continue;
        with_ranks(ranks, [&](const Communicator& world) {
          const auto model = seeded([&] { return deferred_init(make); });
          fully_shard(*model, {.mesh = world, .layout = layout});
          for (const auto& buffer : model->buffers()) EXPECT_FALSE(buffer.is_meta());
          expect_equal(full_state(*model), expected);
        });
      }
    }
  }
}

TEST(DeferredInit, TrainsAsTheEagerModule) {
  with_ranks(2, [](const Communicator& world) {
    const auto make = [] { return Net(); };
    Net eager = seeded(make), deferred = seeded([&] { return deferred_init(make); });
    for (auto net : {eager, deferred}) {
      for (const auto& child : net->children()) fully_shard(child, {.mesh = world});
      fully_shard(net, {.mesh = world});
      net->forward(input(world.rank())).pow(2).sum().backward();
    }
    for (const auto& item : eager->named_parameters()) {
      EXPECT_TRUE(at::equal(full_grad(item.value()), full_grad(deferred->named_parameters()[item.key()]))) << item.key();
    }
  });
}

TEST(DeferredInit, TakesMemoryForOneParameterBesidesTheShards) {
  const models::MlpOptions options{.width = 1024, .layers = 6, .classes = 4};
  constexpr int64_t kLargest = 1024 * 1024 * 4, kSlack = 3 << 20;  // a fingerprint takes blocks of half a megabyte
  with_ranks(2, [&](const Communicator& world) {
    std::optional<models::Mlp> model;
    seeded([&] {
      const Allocations allocations;
      model = deferred_init([&] { return models::Mlp(options); });
      EXPECT_LT(allocations.peak(), kLargest + kSlack);
      return 0;
    });
    const Allocations allocations;
    fully_shard(*model, {.mesh = world, .residence = Residence::Gathered});
    int64_t shards = 0;
    for (const auto& shard : (*model)->parameters()) shards += shard.numel() * 4;
    EXPECT_LT(allocations.peak(), shards + kLargest + kSlack);
    EXPECT_GT(allocations.peak(), shards);
  });
}

TEST(DeferredInit, ForgetsCopiedDataOnceItsParameterIsSharded) {
  constexpr int64_t kNumel = 1 << 20, kBytes = 4 * kNumel, kSlack = 3 << 20;
  struct Copied : Module {
    at::Tensor weight;
    explicit Copied(const at::Tensor& data) {
      weight = register_parameter("weight", torch::empty({kNumel}));
      torch::NoGradGuard no_grad;
      weight.copy_(torch::ones({kNumel}));  // forgotten at once
      weight.copy_(data);
      to(torch::kDouble);  // the data from which it is computed is dropped with the parameter, too
      to(torch::kFloat);
    }
  };
  with_ranks(2, [&](const Communicator& world) {
    const auto data = at::arange(kNumel, at::kFloat);
    const Allocations allocations;
    torch::nn::ModuleList parts = deferred_init([&] {
      torch::nn::ModuleList list;
      for (int i = 0; i < 8; i++) list->push_back(std::make_shared<Copied>(data));
      return list;
    });
    EXPECT_GE(allocations.held(), 8 * kBytes);
    for (const auto& part : *parts) fully_shard(part, {.mesh = world, .residence = Residence::Gathered});
    EXPECT_LT(allocations.held(), 4 * kBytes + kSlack);               // half of eight shards, and nothing else
    EXPECT_LT(allocations.peak(), 8 * kBytes + 4 * kBytes + kSlack);  // the data that is copied, one shard, one parameter, and the same in doubles
    EXPECT_TRUE(at::equal(full_state(*parts)["7.weight"], data));
  });
}

/// Parameters that are parts of one buffer, and a buffer that is a parameter's memory.
struct Parts : Module {
  std::shared_ptr<Module> first = std::make_shared<Module>(), second = std::make_shared<Module>();
  Parts() {
    const auto whole = torch::randn({8, 4});
    members = {register_module("first", first)->register_parameter("weight", whole.slice(0, 0, 3)),
               register_module("second", second)->register_parameter("weight", whole.slice(0, 3, 8)),
               register_parameter("bias", torch::randn({4}))};
    register_buffer("same", members.back().detach());
  }
  std::vector<at::Tensor> members;
};

TEST(DeferredInit, PartsOfOneBufferMayBeShardedOneAfterTheOther) {
  const auto make = [] { return std::make_shared<Parts>(); };
  with_ranks(2, [&](const Communicator& world) {
    const auto eager = seeded(make), deferred = seeded([&] { return deferred_init(make); });
    for (const auto& model : {eager, deferred}) {
      fully_shard(model->first, {.mesh = world});
      fully_shard(model->second, {.mesh = world});
      fully_shard(model, {.mesh = world});
    }
    for (const auto* name : {"first.weight", "second.weight", "bias"}) {
      EXPECT_TRUE(at::equal(full_tensor(*deferred, name), full_tensor(*eager, name))) << name;
    }
  });
}

TEST(DeferredInit, WhatIsCalledLaterIsRecordedToo) {
  const auto finish = [](Net net) {
    torch::NoGradGuard no_grad;
    net->apply([](Module& module) {
      if (auto* const linear = module.as<torch::nn::Linear>()) {
        torch::nn::init::normal_(linear->weight, 0, 0.1);
        linear->bias.copy_(torch::arange(linear->bias.numel()));
      }
    });
    net->to(torch::kBFloat16);
    return net;
  };
  torch::manual_seed(3);
  const auto eager = finish(Net());
  torch::manual_seed(3);
  const auto deferred = finish(deferred_init([] { return Net(); }));
  EXPECT_TRUE(deferred->a->weight.is_meta());
  EXPECT_THAT(message_of<UsageError>([&] { (void)deferred->a->weight.sum().item(); }), HasSubstr("'a.weight'"));
  materialize(deferred);
  expect_equal(state_of(*deferred), state_of(*eager));
}

TEST(DeferredInit, TensorsThatNobodyRegisteredGetTheirValuesWhenTheyAreUsed) {
  torch::manual_seed(3);
  const Corners eager;
  torch::manual_seed(3);
  const auto deferred = deferred_init([] { return std::make_shared<Corners>(); });
  EXPECT_TRUE(at::equal(deferred->frequencies + 1, eager.frequencies + 1));
  EXPECT_FALSE(deferred->frequencies.is_meta());
}

TEST(DeferredInit, AnAliasSeesTheValuesOfItsTensor) {
  struct Aliased : Module {
    at::Tensor table, row;
    Aliased() {
      table = register_buffer("table", torch::arange(6, torch::kFloat).view({2, 3}));
      row = table[1];
    }
  };
  const auto model = deferred_init([] { return std::make_shared<Aliased>(); });
  materialize(*model);
  model->table[1][0] = 9;
  EXPECT_EQ(model->row.sum().item<float>(), 18);
}

TEST(DeferredInit, FixedSeedMakesValuesThatDependOnNamesOnly) {
  struct Pair : Module {
    torch::nn::Linear a{nullptr}, b{nullptr};
    explicit Pair(bool swapped) {
      const auto make = [] {
        auto linear = torch::nn::Linear(31, 17);
        torch::nn::init::normal_(linear->weight, 1, 2);
        torch::nn::init::uniform_(linear->bias, -3, 5);
        torch::NoGradGuard no_grad;
        linear->weight.mul_(0.5);
        return linear;
      };
      if (swapped) b = make();
      a = make();
      if (!swapped) b = make();
      register_module("a", a);
      register_module("b", b);
    }
  };
  const auto state = at::globalContext().defaultGenerator(at::kCPU).get_state();
  const auto whole = deferred_init([] { return std::make_shared<Pair>(false); }, {.seed = 7});
  materialize(*whole);
  EXPECT_TRUE(at::equal(at::globalContext().defaultGenerator(at::kCPU).get_state(), state));
  const auto& weight = whole->a->weight;
  EXPECT_NEAR(weight.mean().item<float>(), 0.5, 0.15);
  EXPECT_NEAR(weight.std().item<float>(), 1, 0.1);
  EXPECT_GT(whole->a->bias.max().item<float>(), 2);
  EXPECT_LT(whole->a->bias.min().item<float>(), -1);
  EXPECT_FALSE(at::equal(weight, whole->b->weight));
  for (const auto layout : {Layout::Flat, Layout::Rows, Layout::WholeParameters}) {
    with_ranks(3, [&](const Communicator& world) {
      const auto model = deferred_init([] { return std::make_shared<Pair>(true); }, {.seed = 7});
      fully_shard(*model, {.mesh = world, .layout = layout});
      expect_equal(full_state(*model), state_of(*whole));
    });
  }
  const auto other = deferred_init([] { return std::make_shared<Pair>(false); }, {.seed = 8});
  materialize(*other);
  EXPECT_FALSE(at::equal(weight, other->a->weight));
}

TEST(DeferredInit, WithASeedARankDrawsOnlyItsPart) {
  with_ranks(4, [](const Communicator& world) {
    auto model = deferred_init(
        [] {
          auto linear = torch::nn::Linear(512, 512);
          torch::nn::init::normal_(linear->weight);
          return linear;
        },
        {.seed = 1});
    const Allocations allocations;
    fully_shard(model, {.mesh = world, .residence = Residence::Gathered});
    EXPECT_LT(allocations.peak(), 512 * 512 * 4 / 4 * 2 + (64 << 10));  // the shard, and the values that are copied into it
  });
}

TEST(DeferredInit, SeededCornersAreComputedWhole) {
  const auto make = [] { return std::make_shared<Corners>(); };
  const auto whole = deferred_init(make, {.seed = 7});
  materialize(*whole);
  with_ranks(2, [&](const Communicator& world) {
    const auto model = deferred_init(make, {.seed = 7});
    fully_shard(*model, {.mesh = world});
    expect_equal(full_state(*model), state_of(*whole));
  });
  const auto& weight = whole->second->weight;
  EXPECT_TRUE(at::allclose(weight.matmul(weight.t()), at::eye(8) * 2.25, 1e-4, 1e-4));  // orthogonal
}

TEST(DeferredInit, RefusesWhatNeedsValues) {
  auto net = deferred_init([] { return Net(); });
  EXPECT_THAT(message_of<UsageError>([&] { net->forward(input()); }),
              AllOf(HasSubstr("parameter 'a.bias', which has none yet, because it was made inside deferred_init"),
                    HasSubstr("materialize(module)")));
  EXPECT_THAT(message_of<c10::Error>([&] { (void)net->a->weight.data_ptr<float>(); }), HasSubstr("made inside tessera::deferred_init"));
  EXPECT_THAT(message_of<UsageError>([&] { deferred_init([] { return deferred_init([] { return Net(); }); }); }),
              HasSubstr("inside deferred_init"));
  with_ranks(1, [&](const Communicator& world) {
    EXPECT_THAT(message_of<UsageError>([&] {
                  deferred_init([&] {
                    Net inner;
                    fully_shard(inner, {.mesh = world});
                    return inner;
                  });
                }),
                HasSubstr("call it with the module that deferred_init returns"));
  });
  EXPECT_EQ(Net()->forward(input()).sizes(), at::IntArrayRef({3, 4}));  // nothing is left of a recording that broke off
}

TEST(DeferredInit, IsNotComputedWhereRank0SendsValues) {
  with_ranks(2, [](const Communicator& world) {
    const auto make = [] {
      auto linear = torch::nn::Linear(6, 4);
      torch::NoGradGuard no_grad;
      linear->weight.fill_(2);
      return linear;
    };
    auto model = deferred_init(make, {.seed = static_cast<uint64_t>(world.rank())});
    torch::NoGradGuard no_grad;
    if (world.is_first()) model->weight.fill_(5);
    fully_shard(model, {.mesh = world, .start = Start::FromRank0});
    EXPECT_EQ(full_parameter(model->weight).max().item<float>(), 5);
    EXPECT_EQ(full_parameter(model->weight).min().item<float>(), 5);
  });
}

TEST(DeferredInit, DifferentRecipesOfRanksAreFoundAtTheFirstUse) {
  with_ranks(2, [](const Communicator& world) {
    auto model = deferred_init([] { return torch::nn::Linear(6, 4); }, {.seed = static_cast<uint64_t>(world.rank())});
    fully_shard(model, {.mesh = world});
    EXPECT_THAT(message_of<UsageError>([&] { model->forward(at::ones({2, 6})); }), HasSubstr("brought different parameters"));
  });
}

TEST(DeferredInit, MaterializesIgnoredParameters) {
  with_ranks(2, [](const Communicator& world) {
    const auto net = seeded([] { return deferred_init([] { return Net(); }); });
    fully_shard(net, {.mesh = world, .ignored = {net->c->bias}});
    EXPECT_TRUE(at::equal(net->c->bias, seeded([] { return Net(); })->c->bias));
  });
}

}  // namespace
}  // namespace tessera::testing::deferred_init_test
