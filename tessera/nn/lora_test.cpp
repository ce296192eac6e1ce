// Adapters: what they change and what they leave alone, sharded or not.
#include "tessera/nn/lora.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/optim/adam.h"
#include "tessera/shard/activation.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/report.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"
#include "tests/testing/net.h"
#include "tests/testing/residences.h"

namespace tessera::testing::lora_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// The inner Net has the linear layers a and b.
Net adapted_net(const lora::Options& options = {.r = 2, .lora_alpha = 4}) {
  auto net = seeded_net();
  lora::apply(net, options);
  return net;
}

/// Gives every parameter of an adapter, in which B is 0 at first, other values.
void change(Net& net, const std::string& adapter, double by) {
  const torch::NoGradGuard no_grad;
  for (auto& item : net->named_parameters()) {
    if (item.key().find("." + adapter + ".") != std::string::npos) item.value().add_(by);
  }
}

TEST(Lora, ChangesNothingUntilItIsTrained) {
  auto plain = seeded_net();
  for (const bool dora : {false, true}) {
    auto net = adapted_net({.r = 2, .use_dora = dora});
    if (dora) lora::reset_magnitudes(net);
    EXPECT_TRUE(at::allclose(net(input()), plain(input()), 1e-6, 1e-6));
    for (const auto& item : net->named_parameters())
      EXPECT_EQ(item.value().requires_grad(), item.key().find("lora_") != std::string::npos) << item.key();
  }
}

TEST(Lora, OfSeveralThoseActThatAreChosen) {
  auto plain = seeded_net();
  auto net = adapted_net();
  lora::apply(net, {.r = 3}, "other");
  EXPECT_THAT(lora::adapters(net), ElementsAre("default", "other"));
  EXPECT_THAT(lora::active_adapters(net), ElementsAre("default"));
  change(net, "default", 0.1);
  change(net, "other", 0.2);
  const auto first = net(input());
  lora::set_adapters(net, {"other"});
  const auto second = net(input());
  EXPECT_FALSE(at::allclose(first, second));
  EXPECT_FALSE(net->named_parameters()["a.lora_A.default.weight"].requires_grad());
  lora::set_adapters(net, {"default", "other"});
  const auto both = net(input());
  EXPECT_FALSE(at::allclose(both, first));
  lora::merge(net);
  EXPECT_TRUE(at::allclose(net(input()), both, 1e-4, 1e-5));
  EXPECT_TRUE(lora::active_adapters(net).empty());
  lora::unmerge(net);
  EXPECT_THAT(lora::active_adapters(net), ElementsAre("default", "other"));
  EXPECT_TRUE(at::allclose(net(input()), both, 1e-4, 1e-5));
  {
    const lora::Disabled without(net);
    EXPECT_TRUE(at::allclose(net(input()), plain(input()), 1e-5, 1e-6));
  }
  EXPECT_TRUE(at::allclose(net(input()), both, 1e-4, 1e-5));
  EXPECT_THAT(message_of<UsageError>([&] { lora::set_adapters(net, {"third"}); }), HasSubstr("default, other"));
}

/// Two Nets, one behind the other.
struct ChainImpl : torch::nn::Module {
  Net encoder = register_module("encoder", seeded_net()), decoder = register_module("decoder", seeded_net());
  at::Tensor forward(const at::Tensor& x) { return decoder(at::pad(encoder(x), {0, 2})); }
};
TORCH_MODULE(Chain);

TEST(Lora, DisabledLeavesEachLayerTheAdaptersThatActedThere) {
  Chain chain;
  for (const std::string name : {"x", "y"}) {
    lora::apply(chain, {.r = 2}, name);
    for (auto* net : {&chain->encoder, &chain->decoder}) change(*net, name, name == "x" ? 0.1 : 0.2);
  }
  lora::set_adapters(chain->encoder, {"x"});
  lora::set_adapters(chain->decoder, {"y"});
  const auto before = chain(input());
  {
    const lora::Disabled off(chain);
    const lora::Disabled again(chain->decoder);
    EXPECT_TRUE(lora::active_adapters(chain).empty());
  }
  EXPECT_TRUE(at::equal(chain(input()), before));
  EXPECT_THAT(lora::active_adapters(chain->encoder), ElementsAre("x"));
  EXPECT_THAT(lora::active_adapters(chain->decoder), ElementsAre("y"));
  {
    const lora::Disabled off(chain);
    lora::set_adapters(chain->encoder, {"y"});
  }
  EXPECT_THAT(lora::active_adapters(chain->encoder), ElementsAre("y"));
  EXPECT_TRUE(lora::active_adapters(chain->decoder).empty());
}

TEST(Lora, DropsWhatTheSameLayersDropThatAreNotSharded) {
  const auto make = [] {
    auto net = adapted_net({.r = 2, .lora_dropout = 0.5});
    change(net, "default", 0.1);
    return net;
  };
  const auto loss_of = [](Net& net, bool in_segment) {
    torch::manual_seed(11);
    const auto x = input().requires_grad_();
    return (in_segment ? activation::checkpoint([&](const at::Tensor& in) { return net(in); }, x) : net(x)).pow(2).sum();
  };
  auto plain = make();
  const auto expected = loss_of(plain, false);
  expected.backward();
  EXPECT_FALSE(at::equal(plain(input()), plain(input())));
  for (const auto residence : residences()) {
    for (const bool in_segment : {false, true}) {
      with_ranks(1, [&](const Communicator& world) {
        auto net = make();
        fully_shard(net, {.mesh = world, .residence = residence});
        const auto loss = loss_of(net, in_segment);
        EXPECT_TRUE(at::equal(loss, expected));
        loss.backward();
        for (const auto& item : plain->named_parameters()) {
          if (!item.value().requires_grad()) continue;
          EXPECT_TRUE(at::allclose(full_grad(net->named_parameters()[item.key()]), item.value().grad(), 1e-6, 1e-6)) << item.key();
        }
      });
    }
  }
}

TEST(Lora, WhatTrainsAsAWholeIsOfOneAdapter) {
  auto net = adapted_net({.r = 2, .layers = {.target_modules = {"a"}}, .modules_to_save = {"c"}, .bias = lora::Bias::LoraOnly});
  const auto refusal = [&](const lora::Options& options) { return message_of<UsageError>([&] { lora::apply(net, options, "other"); }); };
  EXPECT_THAT(refusal({.r = 2, .layers = {.target_modules = {"b"}}, .modules_to_save = {"c"}}),
              HasSubstr("'c' trains with adapter 'default' already, and has one value for all adapters"));
  EXPECT_THAT(refusal({.r = 2, .layers = {.target_modules = {"b"}}, .bias = lora::Bias::All}),
              HasSubstr("biases train with adapter 'default' already"));
  EXPECT_THAT(lora::adapters(net), ElementsAre("default"));
  EXPECT_NO_THROW(lora::apply(net, {.r = 2, .layers = {.target_modules = {"b"}}}, "other"));
}

TEST(Lora, MergesAndTakesOutOnRanksToo) {
  for (const bool dora : {false, true}) {
    for (const int ranks : {1, 2, 3}) {
      for (const auto residence : residences()) {
        with_ranks(ranks, [&](const Communicator& world) {
          auto net = adapted_net({.r = 2, .use_dora = dora});
          if (dora) lora::reset_magnitudes(net);
          change(net, "default", 0.1);
          const auto expected = net(input()), before = net->a->weight.clone();
          fully_shard(net, {.mesh = world, .residence = residence});
          EXPECT_TRUE(at::allclose(net(input()), expected, 1e-5, 1e-6));
          lora::merge(net);
          EXPECT_TRUE(at::allclose(net(input()), expected, 1e-4, 1e-5));
          EXPECT_FALSE(at::allclose(full_parameter(net->a->weight), before));
          lora::unmerge(net);
          EXPECT_TRUE(at::allclose(full_parameter(net->a->weight), before, 1e-4, 1e-5));
          EXPECT_TRUE(at::allclose(net(input()), expected, 1e-4, 1e-5));
        });
      }
    }
  }
}

TEST(Lora, WhatIsFrozenHasNeitherGradientsNorStateNorReductions) {
  with_ranks(2, [](const Communicator& world) {
    auto net = adapted_net();
    fully_shard(net, {.mesh = world});
    optim::AdamW optimizer(parameters(net), {.lr = 0.01});
    for (int step = 0; step < 2; step++) {
      net(input()).pow(2).mean().backward();
      for (const auto& [name, parameter] : named_parameters(net))
        EXPECT_EQ(parameter.grad().defined(), name.find("lora_") != std::string::npos) << name;
      optimizer.step();
      optimizer.zero_grad();
    }
    for (const auto& [name, state] : optimizer.state(net)) EXPECT_THAT(name, HasSubstr("lora_"));
  });
}

TEST(Lora, SurvivesConversionsOfTheModel) {
  auto net = adapted_net();
  change(net, "default", 0.1);
  const auto expected = net(input());
  net->to(at::kDouble);
  EXPECT_TRUE(at::allclose(net(input().to(at::kDouble)), expected.to(at::kDouble), 1e-5, 1e-6));
}

TEST(Lora, PissaTakesThePrincipalPartOutOfTheWeight) {
  auto plain = seeded_net();
  auto net = adapted_net({.r = 2, .lora_alpha = 3, .init_lora_weights = lora::Init::Pissa});
  EXPECT_TRUE(at::allclose(net(input()), plain(input()), 1e-4, 1e-5));
  const auto before = at::linalg_matrix_norm(plain->a->weight.detach(), 2), after = at::linalg_matrix_norm(net->a->weight.detach(), 2);
  EXPECT_LT(after.item<double>(), before.item<double>());
  EXPECT_THAT(message_of<UsageError>([] { adapted_net({.r = 1000, .init_lora_weights = lora::Init::Pissa}); }), HasSubstr("wider than the layer"));
}

TEST(Lora, RefusesWhatMakesNoSense) {
  const auto refusal = [](const lora::Options& options) { return message_of<UsageError>([&] { adapted_net(options); }); };
  EXPECT_THAT(refusal({.layers = {.target_modules = {"q_proj"}}}), HasSubstr("no layer is named 'q_proj'; layers for which it can be are named: a, b, c"));
  EXPECT_THAT(refusal({.layers = {.target_modules = {"a", "d"}}}), HasSubstr("'d'"));
  EXPECT_THAT(refusal({.layers = {.target_pattern = "x.*"}}), HasSubstr("no layer is chosen"));
  EXPECT_THAT(refusal({.r = 0}), HasSubstr("at least 1"));
  EXPECT_THAT(refusal({.r = int64_t{1} << 40}), HasSubstr("'a': a rank of 1099511627776 makes no sense"));
  EXPECT_THAT(refusal({.r = 2, .rank_pattern = {{"b", int64_t{1} << 31}}}), HasSubstr("'b': a rank of 2147483648 makes no sense"));
  EXPECT_THAT(refusal({.lora_dropout = 1}), HasSubstr("dropout"));
  auto net = adapted_net();
  EXPECT_THAT(message_of<UsageError>([&] { lora::apply(net, {}); }), HasSubstr("already"));
  EXPECT_NO_THROW(adapted_net({.r = 500}));  // a warning
}

}  // namespace
}  // namespace tessera::testing::lora_test
