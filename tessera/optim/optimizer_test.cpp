// Tessera's optimizers take the same steps as torch's, on shards and on unsharded parameters.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/local.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/training.h"
#include "tests/testing/allocations.h"
#include "tests/testing/net.h"
#include "tests/testing/residences.h"
#include "tests/testing/warnings.h"

namespace tessera::testing::optimizer_test {
namespace {

/// Largest difference after ten steps on the same gradients.
template <class Make, class Reference>
double difference(const Make& make, const Reference& reference) {
  torch::manual_seed(3);
  std::vector<at::Tensor> ours, theirs;
  for (const auto numel : {7, 1, 30}) {
    ours.push_back(torch::randn({numel, 2}).set_requires_grad(true));
    theirs.push_back(ours.back().detach().clone().set_requires_grad(true));
  }
  const auto own = make(ours);
  const auto other = reference(theirs);
  for (int step = 0; step < 10; step++) {
    for (size_t i = 0; i < ours.size(); i++) {
      if (i == 1 && step < 3) continue;  // a parameter without a gradient at first
      ours[i].mutable_grad() = torch::randn_like(ours[i]);
      theirs[i].mutable_grad() = ours[i].grad().clone();
    }
    own->step();
    other->step();
  }
  double most = 0;
  for (size_t i = 0; i < ours.size(); i++) most = std::max(most, (ours[i] - theirs[i]).abs().max().item<double>());
  return most;
}

TEST(Optimizers, TakeTheStepsOfTorch) {
  using torch::optim::AdamOptions, torch::optim::SGDOptions;
  EXPECT_LT(difference(
                [](auto p) { return std::make_unique<optim::SGD>(p, optim::SgdOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01}); },
                [](auto p) { return std::make_unique<torch::optim::SGD>(p, SGDOptions(0.1).momentum(0.9).weight_decay(0.01)); }),
            1e-6);
  EXPECT_LT(difference([](auto p) { return std::make_unique<optim::SGD>(p, optim::SgdOptions{.lr = 0.1}); },
                       [](auto p) { return std::make_unique<torch::optim::SGD>(p, SGDOptions(0.1)); }),
            1e-6);
  EXPECT_LT(
      difference([](auto p) { return std::make_unique<optim::SGD>(p, optim::SgdOptions{.lr = 0.1, .momentum = 0.8, .nesterov = true}); },
                 [](auto p) { return std::make_unique<torch::optim::SGD>(p, SGDOptions(0.1).momentum(0.8).nesterov(true)); }),
      1e-6);
  EXPECT_LT(difference([](auto p) { return std::make_unique<optim::Adam>(p, optim::AdamOptions{.lr = 0.01, .weight_decay = 0.1}); },
                       [](auto p) { return std::make_unique<torch::optim::Adam>(p, AdamOptions(0.01).weight_decay(0.1)); }),
            1e-6);
  EXPECT_LT(difference([](auto p) { return std::make_unique<optim::AdamW>(p, optim::AdamWOptions{.lr = 0.01}); },
                       [](auto p) { return std::make_unique<torch::optim::AdamW>(p, torch::optim::AdamWOptions(0.01)); }),
            1e-6);
}

TEST(Optimizers, MayHaveGroupsThatCutThroughUnits) {
  run_world({.transport = "threads", .ranks = 2}, [](const Communicator& world) {
    torch::nn::Linear layer(4, 4);
    fully_shard(layer, {.mesh = world, .start = Start::FromRank0});
    std::vector<at::Tensor> matrices, others;
    for (const auto& parameter : parameters(*layer)) (parameter.dim() >= 2 ? matrices : others).push_back(parameter);
    ASSERT_EQ(matrices.size(), 1);
    optim::AdamW optimizer({{.parameters = matrices}, {.parameters = others, .lr = 0.5, .weight_decay = 0}}, {.lr = 0.25});
    layer->forward(at::ones({2, 4})).sum().backward();
    optimizer.step();
    optimizer.set_lr(0.125);
    EXPECT_EQ(optimizer.lr(), 0.125);
    optimizer.zero_grad();
    EXPECT_FALSE(matrices.front().grad().defined());
  });
}

/// Takes a step of a model. A part of the model gets no gradient in some steps.
template <class Optimizer>
void train(Net& net, Optimizer& optimizer, int step) {
  const auto x = input() + step;
  (step % 3 == 1 ? net->a(x) : net(x)).pow(2).mean().backward();
  optimizer.step();
  optimizer.zero_grad();
}

TEST(Optimizers, UpdateUnitsAsTheyDoSingleParameters) {
  for (const int ranks : {1, 2, 3}) {
    run_world({.transport = "threads", .ranks = ranks}, [](const Communicator& world) {
      auto whole = seeded_net(), sharded = seeded_net();
      fully_shard(sharded, {.mesh = world});
      torch::optim::AdamW theirs(whole->parameters(), torch::optim::AdamWOptions(0.01));
      optim::AdamW ours(sharded->parameters(), {.lr = 0.01});
      for (int step = 0; step < 8; step++) {
        train(whole, theirs, step);
        train(sharded, ours, step);
      }
      for (size_t i = 0; i < 6; i++) {
        EXPECT_TRUE(at::allclose(full_parameter(sharded->parameters()[i]), whole->parameters()[i], 1e-5, 1e-6)) << i;
      }
    });
  }
}

TEST(Optimizers, ForgetTheStateThatALoadedOneLacks) {
  torch::nn::Linear net(2, 2);
  optim::AdamW optimizer(net->parameters(), {});
  net->weight.mutable_grad() = at::ones({2, 2});
  optimizer.step();
  std::map<std::string, optim::ParameterState> saved;
  for (const auto& [name, state] : optimizer.state(*net)) {
    for (const auto& [key, value] : state) saved[name][key] = value.clone();
  }
  net->bias.mutable_grad() = at::ones({2});
  optimizer.step();
  optimizer.load_state(*net, saved);
  optimizer.step();
  EXPECT_FLOAT_EQ(optimizer.state(*net).at("bias").at("exp_avg")[0].item<float>(), 0.1F) << "as after its first step";
}

TEST(Optimizers, GoOnFromTheirState) {
  run_world({.transport = "threads", .ranks = 3}, [](const Communicator& world) {
    auto net = sharded_net(world), twin = sharded_net(world);
    fully_shard(net, {.mesh = world});
    fully_shard(twin, {.mesh = world});
    optim::SGD optimizer(net->parameters(), {.lr = 0.1, .momentum = 0.9, .dampening = 0.5});
    for (int step = 0; step < 4; step++) train(net, optimizer, step);
    optim::SGD second(twin->parameters(), {.lr = 0.1, .momentum = 0.9, .dampening = 0.5});
    const auto state = optimizer.state(*net);
    ASSERT_EQ(state.size(), 6);
    EXPECT_EQ(state.at("b.weight").at("momentum_buffer").sizes(), twin->named_parameters()["b.weight"].sizes());
    EXPECT_EQ(state.at("a.weight").at("step").item<int64_t>(), 4);
    EXPECT_EQ(state.at("b.weight").at("step").item<int64_t>(), 3);
    second.load_state(*twin, state);
    {
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < 6; i++) twin->parameters()[i].copy_(net->parameters()[i]);
    }
    for (int step = 4; step < 8; step++) {
      train(net, optimizer, step);
      train(twin, second, step);
    }
    for (size_t i = 0; i < 6; i++) EXPECT_TRUE(at::equal(to_local(net->parameters()[i]), to_local(twin->parameters()[i]))) << i;

    auto other = state;
    other["strange"] = {};
    EXPECT_THAT(message_of<UsageError>([&] { second.load_state(*twin, other); }), ::testing::HasSubstr("'strange'"));
    other = state;
    other["b.weight"]["momentum_buffer"] = at::zeros({100, 1});
    EXPECT_THAT(message_of<UsageError>([&] { second.load_state(*twin, other); }), ::testing::HasSubstr("another number of ranks"));
    optim::Adam adam(twin->parameters(), {});
    EXPECT_THAT(message_of<UsageError>([&] { adam.load_state(*twin, state); }), ::testing::HasSubstr("has no 'exp_avg'"));
  });
}

TEST(Rates, KeepTheirRatiosAlsoThroughZero) {
  const auto group = [](double lr) { return optim::ParameterGroup{.parameters = {at::zeros({1}).set_requires_grad(true)}, .lr = lr}; };
  const auto steps = [&](std::vector<double> rates, std::vector<double> settings) {
    std::vector<optim::ParameterGroup> groups;
    std::vector<at::Tensor> all;
    for (const double rate : rates) groups.push_back(group(rate));
    for (const auto& each : groups) all.push_back(each.parameters.front());
    optim::SGD optimizer(groups, {});
    for (const double lr : settings) optimizer.set_lr(lr);
    for (auto& parameter : all) parameter.mutable_grad() = at::full({1}, -1.0);
    optimizer.step();
    std::vector<double> result;
    for (const auto& parameter : all) result.push_back(parameter.item<double>());
    return result;
  };
  EXPECT_EQ(steps({1, 0.5, 0}, {}), (std::vector<double>{1, 0.5, 0}));
  EXPECT_EQ(steps({1, 0.5, 0}, {0.25, 0, 2}), (std::vector<double>{2, 1, 0}));
  EXPECT_EQ(steps({0, 0}, {2}), (std::vector<double>{2, 2}));
  EXPECT_EQ(steps({0, 0.5}, {}), (std::vector<double>{0, 0.5}));
  EXPECT_THAT(message_of<UsageError>([&] { steps({0, 0.5}, {2}); }), ::testing::HasSubstr("no ratio to keep"));
}

TEST(State, IsMadeForWhatHasGradientsOnly) {
  torch::nn::Sequential model(torch::nn::Linear(64, 64), torch::nn::Linear(8, 8));
  for (auto& parameter : model[0]->parameters()) parameter.set_requires_grad(false);
  const auto bytes_of_a_step = [](torch::nn::Sequential& net) {
    optim::Adam optimizer(net->parameters(), {});
    for (const auto& parameter : net[1]->parameters()) parameter.mutable_grad() = at::empty_like(parameter.detach()).zero_();
    const Allocations allocations;
    optimizer.step();
    EXPECT_EQ(optimizer.state(*net).size(), 2);
    return allocations.bytes();
  };
  const int64_t trained = 8 * 8 * 4, frozen = 64 * 64 * 4;
  const auto whole = bytes_of_a_step(model);
  EXPECT_GE(whole, 2 * trained);
  EXPECT_LT(whole, frozen);
  model->zero_grad();
  with_ranks(1, [&](const Communicator& world) {
    fully_shard(model, {.mesh = world});
    const auto sharded = bytes_of_a_step(model);
    EXPECT_GE(sharded, 2 * trained);
    EXPECT_LT(sharded, frozen);
  });
}

TEST(Optimizers, RefuseWhatWouldNeverBeAveraged) {
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net();
    optim::SGD before(net->parameters(), {.lr = 0.1});
    fully_shard(net->a, {.mesh = world});
    EXPECT_THAT(message_of<UsageError>([&] { optim::SGD(net->parameters(), {}); }),
                ::testing::HasSubstr("of shape [10, 10], given together with shards, is trainable, but in no unit"));
    optim::SGD(net->b->parameters(), {});  // no shard among them
    fully_shard(net->b, {.mesh = world, .ignored = {net->b->weight}});
    set_requires_grad(*net->c, Training::Frozen);
    optim::SGD(net->parameters(), {});
    // An optimizer from before fully_shard holds whole parameters.
    EXPECT_THAT(message_of<UsageError>([&] { before.step(); }), ::testing::HasSubstr("Make optimizers after fully_shard"));
  });
}

TEST(Optimizers, LookAgainBeforeTheyClip) {
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net();
    fully_shard(net->a, {.mesh = world});
    set_requires_grad(*net->b, Training::Frozen);
    set_requires_grad(*net->c, Training::Frozen);
    optim::SGD optimizer(net->parameters(), {.lr = 0.1});
    net(input()).sum().backward();
    EXPECT_NO_THROW(optimizer.clip_grad_norm(1));
    set_requires_grad(*net->c, Training::Trained);  // now its gradient would be this rank's alone
    EXPECT_THAT(message_of<UsageError>([&] { optimizer.clip_grad_norm(1); }), ::testing::HasSubstr("in no unit"));
  });
}

TEST(Optimizers, ForgetAStepThatWasRefused) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    optim::SGD optimizer(parameters(*net), {.lr = 0.1});
    net(input()).sum().backward();
    {
      const auto whole = full_params(*net);
      if (world.rank() == 0) {
        EXPECT_THAT(message_of<UsageError>([&] { optimizer.step(); }), ::testing::HasSubstr("in use unsharded"));
      }
    }
    // The next step is of one unit. No rank waits for others to be done with the units of the step that was refused.
    optimizer.zero_grad();
    const auto before = to_local(parameters(*net)[2]);
    net->a(input()).sum().backward();
    optimizer.step();
    EXPECT_TRUE(at::equal(to_local(parameters(*net)[2]), before));
    EXPECT_TRUE(at::isfinite(net(input())).all().item<bool>());
  });
}

/// Returns the errors of the second step if the ranks take the first one with different optimizers.
template <class Make>
std::vector<std::string> second_step(Residence residence, const Make& make) {
  std::vector<std::string> messages(2);
  with_ranks(2, [&](const Communicator& world) {
    auto net = seeded_net();
    for (const auto& child : net->children()) fully_shard(child, {.mesh = world, .residence = residence});
    const auto optimizer = make(parameters(*net), world.rank());
    const auto step = [&] {
      net(input()).sum().backward();
      optimizer->step();
      optimizer->zero_grad();
    };
    step();
    try {
      step();
      net(input());
    } catch (const DisagreementError& error) {
      messages[world.rank()] = error.what();
    }
  });
  return messages;
}

TEST(Optimizers, ThatDifferBetweenRanksAreNamed) {
  using ::testing::AllOf, ::testing::Each, ::testing::HasSubstr;
  using Made = std::unique_ptr<optim::Optimizer>;
  for (const auto residence : residences()) {
    const auto kinds = second_step(residence, [](auto parameters, int rank) -> Made {
      if (rank == 0) return std::make_unique<optim::SGD>(parameters, optim::SgdOptions{.lr = 0.1});
      return std::make_unique<optim::AdamW>(parameters, optim::AdamWOptions{});
    });
    EXPECT_THAT(
        kinds, Each(AllOf(HasSubstr("different optimizers have written the shards: rank 0 SGD with momentum 0"),
                          HasSubstr("rank 1 AdamW with betas 0.9 and 0.999, eps 1e-08; lr 0.001 and weight decay 0.01 for 6 parameters"))));
    const auto rates = second_step(residence, [](auto parameters, int rank) -> Made {
      return std::make_unique<optim::SGD>(parameters, optim::SgdOptions{.lr = rank == 0 ? 0.1 : 0.2});
    });
    EXPECT_THAT(rates, Each(AllOf(HasSubstr("lr 0.1 and"), HasSubstr("lr 0.2 and"))));
    const auto groups = second_step(residence, [](auto parameters, int rank) -> Made {
      std::vector<optim::ParameterGroup> groups;
      for (size_t i = 0; i < parameters.size(); i++)
        groups.push_back({.parameters = {parameters[i]}, .lr = 0.001 * static_cast<double>(i + 1)});
      if (rank == 1) groups.back().lr = 7;
      return std::make_unique<optim::SGD>(groups, optim::SgdOptions{});
    });
    EXPECT_THAT(groups, Each(HasSubstr("different optimizers have written the shards")));
    const auto alike = second_step(
        residence, [](auto parameters, int) -> Made { return std::make_unique<optim::SGD>(parameters, optim::SgdOptions{.lr = 0.1}); });
    EXPECT_THAT(alike, Each(::testing::IsEmpty()));
  }
}

TEST(Optimizers, OfTorchBesideOursAreNamed) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    net(input()).sum().backward();
    if (world.rank() == 0) {
      optim::SGD(parameters(*net), {.lr = 0.1}).step();
    } else {
      torch::optim::SGD(parameters(*net), torch::optim::SGDOptions(0.1)).step();
    }
    EXPECT_THAT(message_of<DisagreementError>([&] { net(input()).sum().backward(); }),
                ::testing::HasSubstr("rank 1 operators other than Tessera's optimizers"));
  });
}

TEST(Optimizers, RefuseWhatIsNoParameter) {
  const auto leaf = torch::randn({3}).set_requires_grad(true);
  EXPECT_THAT(message_of<UsageError>([&] { optim::SGD({leaf * 2}, {}); }), ::testing::HasSubstr("a tensor that is not a leaf"));
  EXPECT_THAT(message_of<UsageError>([&] { optim::SGD({leaf, leaf}, {}); }), ::testing::HasSubstr("twice"));
  EXPECT_THAT(message_of<UsageError>([&] { optim::SGD(std::vector<at::Tensor>(), {}); }), ::testing::HasSubstr("no parameters"));
}

TEST(Optimizers, WarnOnceIfEachRankTrainsByItself) {
  for (const auto* name : {"RANK", "WORLD_SIZE"}) ASSERT_EQ(::setenv(name, name[0] == 'R' ? "0" : "2", 1), 0);
  const Warnings warnings;
  const auto make = [](bool shards) {
    with_ranks(1, [&](const Communicator& world) {
      auto net = shards ? sharded_net(world) : seeded_net();
      optim::AdamW(parameters(*net), {});
    });
  };
  make(true);
  EXPECT_TRUE(warnings.texts.empty());
  make(false);
  make(false);
  for (const auto* name : {"RANK", "WORLD_SIZE"}) ::unsetenv(name);
  ASSERT_EQ(warnings.texts.size(), 1);
  EXPECT_THAT(warnings.texts.front(), ::testing::HasSubstr("each of the 2 ranks trains by itself; call tessera::fully_shard"));
}

}  // namespace
}  // namespace tessera::testing::optimizer_test
