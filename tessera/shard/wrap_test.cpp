// Policies: which modules become units, and where tied parameters go.
#include "tessera/shard/wrap.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/models/gpt.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"
#include "tessera/testing/net.h"
#include "tessera/testing/numbers.h"
#include "tessera/testing/transports.h"

namespace tessera::testing::wrap_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// The names of the units, in the order of the model.
std::vector<std::string> unit_names(const torch::nn::Module& model) {
  std::vector<std::string> names;
  for (const auto& unit : units(model)) names.push_back(unit->name());
  return names;
}

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
  const auto tokens = at::tensor({0, 3, 5, 1}, at::kLong);
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
    fully_shard(model, {.mesh = world}, WrapPolicy{.chooses = [](const WrapCandidate& candidate) { return candidate.name == "layers.1"; }});
    EXPECT_EQ(units(*model).size(), 2U);
    EXPECT_EQ(shard_info(model->layers[1]->as<TiedImpl::LayerImpl>()->up->weight)->unit, "layers.1");
  });
}

}  // namespace
}  // namespace tessera::testing::wrap_test
