// Parameters that are not sharded with the rest of their module: ignored, replicated, left for an outer unit, or in a unit on a part of the
// ranks.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/grad_scaler.h"
#include "tessera/optim/lamb.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/reduction.h"
#include "tessera/shard/report.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"
#include "tessera/shard/wrap.h"
#include "tests/testing/net.h"
#include "tests/testing/numbers.h"
#include "tests/testing/parity.h"
#include "tests/testing/residences.h"
#include "tests/testing/unit_names.h"

namespace tessera::testing::ignored_parameters_test {
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
    for (const auto residence : residences()) {
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

/// Layers that all ranks share, and an expert for each half of the ranks. A rank has only the expert of its half; an unsharded model has
/// both experts.
struct Experts : torch::nn::Module {
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::Linear expert[2] = {nullptr, nullptr};

  explicit Experts(std::initializer_list<int> present, const char* name = "expert_{}") {
    first = register_module("first", torch::nn::Linear(6, 7));
    last = register_module("last", torch::nn::Linear(7, 3));
    for (const int which : present) {
      expert[which] = register_module(fmt::format(fmt::runtime(name), which), torch::nn::Linear(7, 7));
      const torch::NoGradGuard no_grad;
      for (auto& parameter : expert[which]->parameters()) parameter.copy_(numbers(parameter.sizes(), which));
    }
    fill_with_numbers(*first);
    fill_with_numbers(*last);
  }
  at::Tensor forward(const at::Tensor& x, int which) { return last(torch::tanh(expert[which](torch::tanh(first(x))))); }
};

constexpr int kHalf = 2;

struct HowShared {
  Residence residence = Residence::Auto;
  MeshShape root = {.replicate = 1, .shard = 2 * kHalf};
  bool whole_root = true;  // the root has parameters of its own
};

std::shared_ptr<Experts> sharded_experts(const Communicator& world, const HowShared& how = {}, const char* name = "expert_{}") {
  const int which = world.rank() / kHalf;
  auto model = std::make_shared<Experts>(std::initializer_list<int>{which}, name);
  fully_shard(model->expert[which], {.mesh = Mesh::of_groups(world, {{0, 1}, {2, 3}}), .residence = how.residence});
  const ShardOptions all{.mesh = Mesh(world, how.root), .residence = how.residence};
  if (!how.whole_root) {
    for (const auto& layer : {model->first, model->last}) fully_shard(layer, all);
  }
  fully_shard(model, all);
  return model;
}

/// The loss whose gradients for the plain model are those of the sharded one: an expert's are means over the ranks that have it.
at::Tensor loss_of_all(Experts& plain, int step, const std::function<double(int rank, int step)>& scale) {
  at::Tensor sum;
  for (int rank = 0; rank < 2 * kHalf; rank++) {
    auto loss = plain.forward(input(rank + 3 * step), rank / kHalf).pow(2).mean() * scale(rank, step);
    sum = sum.defined() ? sum + loss : loss;
  }
  return sum / (2 * kHalf);
}

double any_loss(int /*rank*/, int /*step*/) {
  return 3;
}

void expect_experts(const Communicator& world, Experts& model, Experts& plain) {
  const int which = world.rank() / kHalf;
  const auto expect = [](const at::Tensor& own, const at::Tensor& whole) {
    EXPECT_TRUE(at::allclose(full_parameter(own), whole, 1e-4, 1e-6)) << full_parameter(own) << whole;
  };
  expect(model.first->weight, plain.first->weight);
  expect(model.last->bias, plain.last->bias);
  expect(model.expert[which]->weight, plain.expert[which]->weight);
  expect(model.expert[which]->bias, plain.expert[which]->bias);
}

void average_experts_over_their_ranks(Experts& plain) {
  for (auto& expert : plain.expert) {
    for (auto& parameter : expert->parameters()) parameter.mutable_grad() *= 2;
  }
}

constexpr double kMostNorm = 0.5;

/// Trains with this optimizer as a plain model would. `clip` returns the norm.
template <class MakeOptimizer, class Clip>
void expect_experts_train(const HowShared& how, const MakeOptimizer& make, const Clip& clip) {
  with_ranks(2 * kHalf, [&](const Communicator& world) {
    const auto model = sharded_experts(world, how);
    Experts plain({0, 1});
    auto optimizer = make(parameters(*model)), whole = make(plain.parameters());
    for (int step = 0; step < 4; step++) {
      (model->forward(input(world.rank() + 3 * step), world.rank() / kHalf).pow(2).mean() * 3).backward();
      loss_of_all(plain, step, any_loss).backward();
      average_experts_over_their_ranks(plain);
      const auto norm = clip(optimizer, parameters(*model)).template item<double>();
      EXPECT_NEAR(norm, clip(whole, plain.parameters()).template item<double>(), 1e-4 * norm) << "step " << step;
      EXPECT_GT(norm, kMostNorm);
      optimizer.step();
      whole.step();
      optimizer.zero_grad();
      whole.zero_grad();
    }
    expect_experts(world, *model, plain);
  });
}

TEST(OnAPartOfTheRanks, UnitsCountForOneNormOfTheWholeModel) {
  const auto ours = [](auto& optimizer, const auto& /*parameters*/) { return optimizer.clip_grad_norm(kMostNorm); };
  const auto free = [](auto& /*optimizer*/, const auto& parameters) { return clip_grad_norm(parameters, kMostNorm); };
  const auto largest = [](auto& optimizer, const auto& /*parameters*/) {
    return optimizer.clip_grad_norm(kMostNorm / 10, std::numeric_limits<double>::infinity()) * 10;
  };
  const auto sgd = [](auto list) { return optim::SGD(std::move(list), {.lr = 0.1, .momentum = 0.5}); };
  for (const auto residence : residences()) {
    for (const HowShared& how : {HowShared{.residence = residence}, HowShared{.residence = residence, .root = {.replicate = 2, .shard = 2}},
                                 HowShared{.residence = residence, .whole_root = false}}) {
      expect_experts_train(how, sgd, ours);
      expect_experts_train(how, sgd, largest);
      expect_experts_train(how, [](auto list) { return optim::Lamb(std::move(list), {.lr = 0.01}); }, ours);
      expect_experts_train(how, [](auto list) { return torch::optim::AdamW(std::move(list), torch::optim::AdamWOptions(0.01)); }, free);
    }
  }
}

TEST(OnAPartOfTheRanks, InfInOneUnitEndsTheStepOfAllRanks) {
  const auto scale = [](int rank, int step) { return rank == 3 && step == 1 ? std::numeric_limits<double>::infinity() : 3; };
  const auto run = [&](const auto& make) {
    with_ranks(2 * kHalf, [&](const Communicator& world) {
      const auto model = sharded_experts(world);
      Experts plain({0, 1});
      auto optimizer = make(parameters(*model)), whole = make(plain.parameters());
      optim::GradScaler scaler({.init_scale = 8});
      for (int step = 0; step < 3; step++) {
        const auto loss = model->forward(input(world.rank() + 3 * step), world.rank() / kHalf).pow(2).mean();
        scaler.scale(loss * scale(world.rank(), step)).backward();
        // The layers that all share have inf on all ranks, so only the expert's gradients tell the halves apart.
        for (const auto& parameter : {model->first, model->last}) {
          for (auto& shard : parameters(*parameter)) {
            if (step == 1) shard.mutable_grad().fill_(1);
          }
        }
        EXPECT_EQ(std::isfinite(grad_norm(parameters(*model)).item<double>()), step != 1);
        EXPECT_EQ(scaler.step(optimizer), step != 1);
        scaler.update();
        EXPECT_EQ(scaler.get_scale(), step == 0 ? 8 : 4);
        optimizer.zero_grad();
        if (step == 1) continue;
        loss_of_all(plain, step, scale).backward();
        average_experts_over_their_ranks(plain);
        whole.step();
        whole.zero_grad();
      }
      expect_experts(world, *model, plain);
    });
  };
  run([](auto list) { return optim::SGD(std::move(list), {.lr = 0.1}); });
  run([](auto list) { return torch::optim::SGD(std::move(list), 0.1); });
}

TEST(OnAPartOfTheRanks, WholeStatesAreRefusedIfTheyWouldLackAnything) {
  with_ranks(2 * kHalf, [&](const Communicator& world) {
    const auto alike = sharded_experts(world, {}, "expert");
    EXPECT_THAT(message_of<UsageError>([&] { full_state(*alike); }),
                AllOf(HasSubstr("one of several parameters of the same name: 'expert.bias', 'expert.weight'"), HasSubstr("\"expert_1\"")));
    const auto apart = sharded_experts(world);
    EXPECT_THAT(message_of<UsageError>([&] { full_state(*apart, Ranks::First); }),
                AllOf(HasSubstr("would leave out what only some of the ranks have: 'expert_0.bias'"), HasSubstr("checkpoint::save")));
    EXPECT_EQ(full_state(*apart->first).size(), 2);
    const int which = world.rank() / kHalf;
    const auto outside = sharded_experts(world);
    outside->expert[which]->register_parameter("temperature", at::ones({1}), /*requires_grad=*/false);
    EXPECT_THAT(message_of<UsageError>([&] { full_state(*outside); }),
                AllOf(HasSubstr("in no unit and that only some of the ranks have: 'expert_0.temperature'"), HasSubstr("replicated")));
    const auto own = full_state(*apart->expert[which], Ranks::First);  // concerns the ranks that have it
    EXPECT_EQ(own.size(), world.rank() % kHalf == 0 ? 2 : 0);
  });
}

TEST(OnAPartOfTheRanks, WhatContainsUnitsHasAllOfTheirRanks) {
  with_ranks(4, [](const Communicator& world) {
    auto net = seeded_net();
    fully_shard(net->a, {.mesh = world});
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(net, {.mesh = Mesh::of_groups(world, {{0, 1}, {2, 3}})}); }),
                HasSubstr("unit 'Linear' lies on 4 ranks, but module Net that contains it would lie on 2"));
  });
}

TEST(OnAPartOfTheRanks, GradientsMayBeReducedByThoseWhoHaveThem) {
  with_ranks(4, [](const Communicator& world) {
    auto net = seeded_net();
    fully_shard(net->a, {.mesh = Mesh::of_groups(world, {{0, 1}, {2, 3}}), .schedule = {.unused_parameters = UnusedParameters::Zeros}});
    fully_shard(net, {.mesh = world, .schedule = {.unused_parameters = UnusedParameters::Zeros}});
    {
      const auto local = no_sync(*net);
      net(input()).pow(2).sum().backward();
    }
    if (world.rank() < 2) sync_gradients(*net->a);
    EXPECT_EQ(unsynced_grad(net->a->weight).defined(), world.rank() >= 2);
    world.barrier();
    sync_gradients(*net);
  });
}

struct OnStack : torch::nn::Module {
  torch::nn::Linear first = register_module("first", torch::nn::Linear(3, 2));
};

TEST(Apart, NothingMayBeRegisteredLaterInAModuleOnTheStackEither) {
  with_ranks(2, [](const Communicator& world) {
    OnStack model;
    fully_shard(model, {.mesh = world, .start = Start::FromRank0});
    optim::SGD optimizer(parameters(model), {.lr = 0.1});
    model.first->forward(at::ones({1, 3})).sum().backward();
    model.first->register_parameter("late", at::ones({1})).mutable_grad() = at::ones({1});
    EXPECT_THAT(message_of<UsageError>([&] { optimizer.step(); }),
                AllOf(HasSubstr("'late', which was not there when Linear was sharded, is trainable"), HasSubstr("register it before")));
  });
}

/// A net whose last layer is ignored, after a backward pass.
Net with_ignored(const Communicator& world, bool averaged) {
  auto net = seeded_net();
  fully_shard(net, {.mesh = world, .ignored = net->c->parameters()}, wrap_classes({"Linear"}));
  net(input(world.rank())).pow(2).mean().backward();
  if (averaged) average_gradients(parameters(*net), world);
  return net;
}

TEST(Ignored, TrainAsOthersIfTheirGradientsAreAveraged) {
  with_ranks(3, [](const Communicator& world) {
    auto plain = seeded_net();
    mean_over_ranks(world, [&](int rank) { return plain(input(rank)).pow(2).mean(); }).backward();
    const auto net = with_ignored(world, /*averaged=*/true);
    EXPECT_TRUE(at::allclose(net->c->weight.grad(), plain->c->weight.grad(), 1e-5, 1e-6));
    EXPECT_TRUE(at::allclose(grad_norm(parameters(*net)), grad_norm(plain->parameters())));
    optim::SGD optimizer(parameters(*net), {.lr = 0.1});
    optimizer.step();
    optimizer.zero_grad();
    // A rank without a gradient for a parameter counts as zero. A parameter for which no rank has a gradient gets none.
    if (world.rank() == 1) net->c->bias.mutable_grad() = at::full({4}, 3.0);
    average_gradients(parameters(*net), world);
    EXPECT_TRUE(at::equal(net->c->bias.grad(), at::ones({4})));
    EXPECT_FALSE(net->c->weight.grad().defined());
  });
}

TEST(Ignored, ThatNobodyAveragesAreNamedWhereTheyAreUsedFirst) {
  with_ranks(2, [](const Communicator& world) {
    const auto said = AllOf(HasSubstr("different values or gradients of a parameter in ShardOptions::ignored"), HasSubstr("'c.weight'"),
                            HasSubstr("tessera::average_gradients(parameters, world)"));
    const auto net = with_ignored(world, /*averaged=*/false);
    const auto before = net->c->weight.detach().clone();
    EXPECT_THAT(message_of<DisagreementError>([&] { clip_grad_norm(parameters(*net), 1); }), said);
    EXPECT_THAT(message_of<DisagreementError>([&] { gradients_are_finite(parameters(*net)); }), said);
    optim::SGD all(parameters(*net), {.lr = 0.1}), alone(net->c->parameters(), {.lr = 0.1});
    for (auto* optimizer : {&all, &alone}) {
      EXPECT_THAT(message_of<DisagreementError>([&] { optimizer->step(); }), said);
      EXPECT_THAT(message_of<DisagreementError>([&] { world.rank() == 0 ? optimizer->step() : optimizer->skip_step(); }), said);
    }
    EXPECT_TRUE(at::equal(net->c->weight, before));
  });
}

TEST(Ignored, HaveTheSameValuesOnAllRanks) {
  with_ranks(2, [](const Communicator& world) {
    auto net = with_ignored(world, /*averaged=*/true);
    const torch::NoGradGuard no_grad;
    net->c->bias.add_(world.rank());
    EXPECT_THAT(message_of<DisagreementError>([&] { grad_norm(parameters(*net)); }), HasSubstr("rank 1: 'c.bias' values #"));
  });
}

TEST(Ignored, AreLookedAtUntilTheyHaveHadAGradient) {
  with_ranks(2, [](const Communicator& world) {
    auto net = with_ignored(world, /*averaged=*/true);
    for (auto& parameter : net->c->parameters()) parameter.set_requires_grad(false);
    optim::SGD optimizer(parameters(*net), {.lr = 0.1});
    optimizer.step();
    optimizer.zero_grad();
    for (auto& parameter : net->c->parameters()) parameter.set_requires_grad(true);
    optimizer.skip_step();
    net(input(world.rank())).pow(2).mean().backward();
    EXPECT_THAT(message_of<DisagreementError>([&] { optimizer.step(); }), HasSubstr("'c.weight'"));
    average_gradients(parameters(*net), world);
    optimizer.step();
    optimizer.zero_grad();
    const auto before = world.traffic(Operation::AllReduce).calls;
    optimizer.skip_step();
    EXPECT_EQ(world.traffic(Operation::AllReduce).calls, before);
  });
}

}  // namespace
}  // namespace tessera::testing::ignored_parameters_test
