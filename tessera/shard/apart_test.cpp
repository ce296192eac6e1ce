// Parameters that are treated apart: ignored, replicated, left for a unit further out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/optim/adam.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/report.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"
#include "tessera/shard/wrap.h"
#include "tessera/testing/net.h"
#include "tessera/testing/parity.h"
#include "tessera/testing/unit_names.h"

namespace tessera::testing::apart_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Biased : TrainedModel {
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  Biased() {
    first = register_module("first", torch::nn::Linear(5, 7));
    norm = register_module("norm", torch::nn::LayerNorm(std::vector<int64_t>{7}));
    second = register_module("second", torch::nn::Linear(7, 3));
  }
  at::Tensor loss(at::Generator& batches) override { return second(norm(first(at::randn({4, 5}, batches)))).pow(2).mean(); }
};

TEST(Replicated, TrainToTheBitAsReplicatedModels) {
  const auto optimizer = [](std::vector<at::Tensor> parameters) { return std::make_unique<torch::optim::SGD>(std::move(parameters), 0.1); };
  for (const int ranks : {1, 2, 3}) {
    for (const auto residence : {Residence::Gathered, Residence::NodeShared}) {
      expect_parity(
          ranks, [] { return std::make_shared<Biased>(); }, optimizer, 4,
          [&](const auto& model, const Communicator& world) {
            auto& biased = *model->template as<Biased>();
            fully_shard(biased.first, {.mesh = world, .residence = residence, .replicated = {biased.first->bias}});
            fully_shard(model, {.mesh = world, .residence = residence, .replicated = biased.norm->parameters()});
            EXPECT_EQ(shard_info(biased.first->bias)->numel, 7);
            EXPECT_EQ(shard_info(biased.norm->weight)->numel, 7);
            EXPECT_EQ(shard_info(biased.second->weight)->unit, "Biased");
            EXPECT_EQ(shard_info(biased.norm->weight)->unit, "Biased.(replicated)");
          });
    }
  }
}

TEST(Replicated, AreAUnitOfTheirOwn) {
  with_ranks(2, [](const Communicator& world) {
    Biased model;
    const ShardOptions options{.mesh = world, .listing = Listing::Flat, .shard_size_multiple = 64, .replicated = {model.first->bias}};
    fully_shard(model.first, options);
    const std::vector<std::shared_ptr<torch::nn::Module>> ends = {model.norm.ptr(), model.second.ptr()};
    fully_shard(ends, {.mesh = world, .replicated = {model.norm->bias, model.second->bias}});
    fully_shard(model, {.mesh = world});
    EXPECT_THAT(unit_names(model),
                ::testing::UnorderedElementsAre("first", "first.(replicated)", "norm+second", "norm.(replicated)+second.(replicated)"));
    EXPECT_THAT(describe(model), HasSubstr("\n  first.(replicated) "));
    EXPECT_EQ(shard_info(model.second->bias)->unit, "norm.(replicated)+second.(replicated)");
    EXPECT_EQ(shard_info(model.second->bias)->name, "second.bias");
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(model.first, options); }), HasSubstr("sharded already"));
  });
}

TEST(Replicated, HaveNormsAndOptimizersAsOthers) {
  with_ranks(3, [](const Communicator& world) {
    auto net = seeded_net(), plain = seeded_net();
    fully_shard(net, {.mesh = world, .replicated = {net->a->bias, net->c->weight}}, wrap_classes({"Linear"}));
    EXPECT_THAT(unit_names(*net), ::testing::UnorderedElementsAre("a", "a.(replicated)", "b", "c", "c.(replicated)"));
    optim::AdamW sharded(parameters(*net), {.lr = 1e-2}), replicated(plain->parameters(), {.lr = 1e-2});
    for (int step = 0; step < 3; step++) {
      net(input(world.rank())).pow(2).mean().backward();
      mean_over_ranks(world, [&](int rank) { return plain(input(rank)).pow(2).mean(); }).backward();
      EXPECT_TRUE(at::allclose(clip_grad_norm(parameters(*net), 0.1), clip_grad_norm(plain->parameters(), 0.1)));
      sharded.step();
      replicated.step();
      sharded.zero_grad();
      replicated.zero_grad();
    }
    EXPECT_TRUE(at::allclose(full_parameter(net->c->weight), plain->c->weight, 1e-4, 1e-6));
    EXPECT_TRUE(at::allclose(full_parameter(net->a->bias), plain->a->bias, 1e-4, 1e-6));
  });
}

TEST(Apart, MustBeParametersOfTheModuleAndNamedOnce) {
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net();
    const auto refused = [&](ShardOptions options) { return message_of<UsageError>([&] { fully_shard(net, options); }); };
    const auto message = refused({.mesh = world, .ignored = {net->a->weight.detach()}});
    EXPECT_THAT(message, HasSubstr("ShardOptions::ignored has a tensor of Float [10, 6] that is no parameter of Net"));
    EXPECT_THAT(refused({.mesh = world, .replicated = {at::Tensor()}}),
                HasSubstr("ShardOptions::replicated has a tensor that is undefined"));
    EXPECT_THAT(refused({.mesh = world, .left_out = {net->a->weight, net->a->weight}}), HasSubstr("'a.weight' is named twice"));
    EXPECT_THAT(refused({.mesh = world, .ignored = {net->a->weight}, .replicated = {net->a->weight}}),
                HasSubstr("in ShardOptions::ignored and in ShardOptions::replicated"));
    EXPECT_THAT(
        message_of<UsageError>([&] { fully_shard(net, {.mesh = world, .ignored = {net->a->weight, net->a->weight}}, wrap_always()); }),
        HasSubstr("named twice"));
    EXPECT_TRUE(units(*net).empty());
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(net->a, {.mesh = world, .ignored = {net->b->weight}}); }),
                HasSubstr("tensor of Float [10, 10] that is no parameter of Linear"));
    fully_shard(net->a, {.mesh = world});
    EXPECT_THAT(refused({.mesh = world, .replicated = {net->a->weight}}), HasSubstr("names 'weight', which is in unit 'Linear' already"));
  });
}

TEST(Apart, FitsAnyMeshOfOneOrTwoAxes) {
  with_ranks(4, [](const Communicator& world) {
    const Mesh mesh(world, {{"pp", 2}, {"replicate", 1}, {"shard", 2}});
    auto net = seeded_net();
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(net, {.mesh = mesh}); }),
                AllOf(HasSubstr("too many axes to shard a model over"), HasSubstr("mesh.sub({\"replicate\", \"shard\"})")));
    EXPECT_TRUE(units(*net).empty());
    // Each half of the world trains a model of its own.
    fully_shard(net, {.mesh = mesh.sub({"replicate", "shard"}), .replicated = {net->c->bias}});
    net(input(world.rank())).pow(2).mean().backward();
    auto plain = seeded_net();
    const auto first = world.rank() / 2 * 2;
    ((plain(input(first)).pow(2).mean() + plain(input(first + 1)).pow(2).mean()) / 2).backward();
    for (const auto& [sharded, whole] : {std::pair(net->b->weight, plain->b->weight), std::pair(net->c->bias, plain->c->bias)}) {
      EXPECT_TRUE(at::allclose(full_grad(sharded), whole.grad(), 1e-5, 1e-6));
    }
  });
}

TEST(Ties, AcrossUnitsNameBothPlacesAndTheWayOut) {
  with_ranks(1, [](const Communicator& world) {
    struct Head : torch::nn::Module {
      explicit Head(const at::Tensor& weight) { register_parameter("weight", weight); }
    };
    struct Model : torch::nn::Module {
      torch::nn::Embedding embedding{nullptr};
      std::shared_ptr<Head> head;
      Model() {
        embedding = register_module("embedding", torch::nn::Embedding(6, 4));
        head = register_module("head", std::make_shared<Head>(embedding->weight));
      }
    };
    const auto tied = std::make_shared<Model>();
    fully_shard(tied->embedding, {.mesh = world});
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(tied, {.mesh = world}); }),
                AllOf(HasSubstr("parameter 'head.weight' is tied to one of unit 'Embedding', 'embedding.weight', but lies outside"),
                      HasSubstr("fully_shard(std::vector<std::shared_ptr<torch::nn::Module>>{...}, options)"), HasSubstr(".left_out")));
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(tied->head, {.mesh = world}); }),
                HasSubstr("'weight' is tied to one of unit 'Embedding', 'weight', but"));

    const auto list = std::make_shared<Model>();
    fully_shard(std::vector<std::shared_ptr<torch::nn::Module>>{list->embedding.ptr(), list->head}, {.mesh = world});
    fully_shard(list, {.mesh = world});
    EXPECT_THAT(unit_names(*list), ElementsAre("embedding+head"));
  });
}

}  // namespace
}  // namespace tessera::testing::apart_test
