// Policies: which modules become units, and where tied parameters go.
#include "tessera/shard/wrap.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/models/gpt.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/report.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"
#include "tessera/shard/unsharding.h"
#include "tests/testing/default_device.h"
#include "tests/testing/net.h"
#include "tests/testing/numbers.h"
#include "tests/testing/transports.h"
#include "tests/testing/unit_names.h"

namespace tessera::testing::wrap_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Two layers between an embedding and a head that share their weight.
struct TiedImpl : torch::nn::Module {
  struct LayerImpl : torch::nn::Module {
    torch::nn::Linear up{nullptr}, down{nullptr};
    LayerImpl() {
      up = register_module("up", torch::nn::Linear(4, 8));
      down = register_module("down", torch::nn::Linear(8, 4));
    }
    at::Tensor forward(const at::Tensor& x) { return x + down(torch::tanh(up(x))); }
  };
  struct HeadImpl : torch::nn::Module {
    at::Tensor weight;
    explicit HeadImpl(const at::Tensor& shared) : weight(register_parameter("weight", shared)) {}
  };
  torch::nn::Embedding embedding{nullptr};
  torch::nn::ModuleList layers;
  std::shared_ptr<HeadImpl> head;
  TiedImpl() {
    embedding = register_module("embedding", torch::nn::Embedding(6, 4));
    layers = register_module("layers", torch::nn::ModuleList(std::make_shared<LayerImpl>(), std::make_shared<LayerImpl>()));
    head = register_module("head", std::make_shared<HeadImpl>(embedding->weight));
    fill_with_numbers(*this);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    auto x = embedding(tokens);
    for (const auto& layer : *layers) x = layer->as<LayerImpl>()->forward(x);
    return at::linear(x, head->weight);
  }
};
TORCH_MODULE(Tied);

TEST(WrapPolicy, ChoosesByClass) {
  with_ranks(2, [](const Communicator& world) {
    Tied model;
    fully_shard(model, {.mesh = world}, wrap_classes({"Layer"}));
    EXPECT_THAT(unit_names(*model), ElementsAre("Tied", "layers.0", "layers.1"));
    Tied other;
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(other, {.mesh = world}, wrap_classes({"BertLayer"})); }),
                AllOf(HasSubstr("no module of the class BertLayer"), HasSubstr("Embedding, Head, Layer, Linear, ModuleList, Tied")));
    EXPECT_THAT(unit_names(*other), ElementsAre());
  });
}

TEST(WrapPolicy, LeavesTiedParametersToTheUnitThatContainsAllTheirPlaces) {
  const auto tokens = here(torch::tensor({0, 3, 5, 1}, at::kLong));
  for (const auto& policy : {wrap_always(), wrap_classes({"Head", "Embedding"}), wrap_by_size({.min_params = 30})}) {
    with_ranks(2, [&](const Communicator& world) {
      Tied sharded, unsharded;
      fully_shard(sharded, {.mesh = world}, policy);
      EXPECT_EQ(shard_info(sharded->head->weight)->unit, "Tied");
      EXPECT_EQ(shard_info(sharded->embedding->weight)->name, "embedding.weight");
      for (int step = 0; step < 2; step++) {
        sharded->zero_grad();
        unsharded->zero_grad();
        sharded->forward(tokens).pow(2).mean().backward();
        unsharded->forward(tokens).pow(2).mean().backward();
        EXPECT_TRUE(at::allclose(full_grad(sharded->embedding->weight), unsharded->embedding->weight.grad()));
      }
    });
  }
}

TEST(WrapPolicy, ChoosesBySizeFromTheInsideOutwards) {
  with_ranks(2, [](const Communicator& world) {
    Tied model;  // up has 40 values, down 36, a layer 76
    fully_shard(model, {.mesh = world}, wrap_by_size({.min_params = 40}));
    EXPECT_THAT(unit_names(*model), ElementsAre("Tied", "layers.0.up", "layers.1.up"));
    Tied layers;
    fully_shard(layers, {.mesh = world}, wrap_by_size({.min_params = 70}));
    EXPECT_THAT(unit_names(*layers), ElementsAre("Tied", "layers.0", "layers.1"));
    Tied leaves;
    fully_shard(leaves, {.mesh = world}, wrap_by_size({.min_params = 40, .leaves = {"Layer"}}));
    EXPECT_EQ(shard_info(leaves->layers[0]->as<TiedImpl::LayerImpl>()->up->weight)->unit, "layers.0");
    Tied lists;
    fully_shard(lists, {.mesh = world}, wrap_by_size({.min_params = 100, .exclude = {}}));
    EXPECT_EQ(shard_info(lists->layers[0]->as<TiedImpl::LayerImpl>()->up->weight)->unit, "layers");
  });
}

TEST(WrapPolicy, MayBeAnyFunction) {
  with_ranks(2, [](const Communicator& world) {
    Tied model;
    fully_shard(model, {.mesh = world}, WrapPolicy{.chooses = [](const ModuleInfo& info) { return info.name == "layers.1"; }});
    EXPECT_EQ(units(*model).size(), 2U);
    EXPECT_EQ(shard_info(model->layers[1]->as<TiedImpl::LayerImpl>()->up->weight)->unit, "layers.1");
  });
}

TEST(WrapPolicy, MayGiveModulesOptionsOfTheirOwn) {
  with_ranks(2, [](const Communicator& world) {
    Tied model;
    auto policy = wrap_classes({"Layer"});
    const ShardOptions options{.mesh = world};
    policy.options = [&](const ModuleInfo& info) -> std::optional<ShardOptions> {
      if (info.name != "layers.1") return std::nullopt;
      auto own = options;
      own.mixed_precision.param_dtype = torch::kBFloat16;
      own.layout = Layout::Rows;
      return own;
    };
    fully_shard(model, options, policy);
    const auto layer = [&](size_t i) { return model->layers[i]->as<TiedImpl::LayerImpl>()->up->weight; };
    EXPECT_EQ(layer(0).scalar_type(), torch::kFloat);
    EXPECT_EQ(layer(1).scalar_type(), torch::kBFloat16);
    EXPECT_EQ(shard_info(layer(1))->numel, 16);  // half of the rows
    model->forward(here(torch::tensor({0, 3}, at::kLong))).pow(2).mean().backward();

    Tied other;
    auto wrong = wrap_always();
    wrong.options = [&](const ModuleInfo&) { return ShardOptions{.mesh = world, .ignored = {other->embedding->weight}}; };
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(other, options, wrong); }),
                HasSubstr("the policy's options for 'layers.0.up' name parameters that are ignored, replicated or left out"));
  });
}

TEST(WrapPolicy, MergesSmallNeighbours) {
  with_ranks(2, [](const Communicator& world) {
    const auto tokens = here(torch::tensor({0, 3, 5, 1}, at::kLong));
    const auto units_with = [&](WrapPolicy policy, int64_t merge_below) {
      Tied model, unsharded;
      policy.merge_below = merge_below;
      fully_shard(model, {.mesh = world}, policy);
      model->forward(tokens).pow(2).mean().backward();
      unsharded->forward(tokens).pow(2).mean().backward();
      const auto of = [](Tied& tied) { return tied->layers[1]->as<TiedImpl::LayerImpl>()->down->weight; };
      EXPECT_TRUE(at::allclose(full_grad(of(model)), of(unsharded).grad()));
      const auto text = describe(*model);
      for (const auto& name : unit_names(*model)) EXPECT_THAT(text, HasSubstr(name + " "));
      return unit_names(*model);
    };
    // In each layer, `up` has 40 values and `down` 36.
    EXPECT_THAT(units_with(wrap_always(), 0), ElementsAre("Tied", "layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"));
    EXPECT_THAT(units_with(wrap_always(), 75), ElementsAre("Tied", "layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"));
    EXPECT_THAT(units_with(wrap_always(), 76), ElementsAre("Tied", "layers.0.up+layers.0.down", "layers.1.up+layers.1.down"));
    EXPECT_THAT(units_with(wrap_classes({"Layer"}), 1000), ElementsAre("Tied", "layers.0+layers.1"));
  });
}

TEST(WrapPolicy, IgnoresModulesByTheirPath) {
  with_ranks(2, [](const Communicator& world) {
    Tied model;
    const auto& names = model->named_parameters();
    const auto chosen = parameters_of_modules(*model, "layers\\.\\d+\\.down|layers\\.0");
    EXPECT_EQ(chosen.size(), 6U);  // two of them are matched twice
    fully_shard(model, {.mesh = world, .ignored = chosen}, wrap_always());
    EXPECT_THAT(unit_names(*model), ElementsAre("Tied", "layers.1.up"));
    for (const auto* name : {"layers.0.up.weight", "layers.0.down.bias", "layers.1.down.weight"}) {
      EXPECT_FALSE(shard_info(names[name])) << name;
      EXPECT_EQ(names[name].numel(), model->named_parameters()[name].numel());
    }
    EXPECT_EQ(parameters(*model).size(), 9U);
    model->forward(here(torch::tensor({0, 3}, at::kLong))).pow(2).mean().backward();

    EXPECT_THAT(message_of<UsageError>([&] { (void)parameters_of_modules(*model, "layer.0"); }),
                AllOf(HasSubstr("no module matches 'layer.0' (did you mean 'layers.0'?)"), HasSubstr("'embedding', 'layers'")));
    EXPECT_THAT(message_of<UsageError>([&] { (void)parameters_of_modules(*model, "layers.("); }), HasSubstr("is not a regular expression"));
  });
}

TEST(WrapPolicy, NeedsAFunctionAndModules) {
  with_ranks(1, [](const Communicator& world) {
    const ShardOptions options{.mesh = world};
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(seeded_net(), options, WrapPolicy{}); }), HasSubstr("no function `chooses`"));
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(std::shared_ptr<torch::nn::LinearImpl>(), options); }),
                HasSubstr("an empty shared_ptr"));
    const std::vector<std::shared_ptr<torch::nn::Module>> modules = {nullptr}, none;
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(modules, options); }), HasSubstr("an empty shared_ptr"));
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(none, options); }), HasSubstr("an empty list"));
    auto net = seeded_net();
    fully_shard(net, options);
    EXPECT_THAT(message_of<UsageError>([&] { set_modules_to_forward_prefetch(*net, modules); }),
                HasSubstr("an empty shared_ptr in its list"));
  });
}

TEST(WrapPolicy, KnowsWhatIsIgnoredWhereNothingElseIsLeft) {
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net();
    fully_shard(net, {.mesh = world, .ignored = {net->c->weight, net->c->bias}}, wrap_classes({"Linear"}));
    EXPECT_THAT(unit_names(*net), ElementsAre("a", "b"));
    EXPECT_EQ(parameters(*net).size(), 6U);  // not refused as trainable parameters in no unit
  });
}

}  // namespace
}  // namespace tessera::testing::wrap_test
