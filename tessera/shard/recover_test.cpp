// tessera::recover after an exception on some ranks, and models that train in several threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <thread>

#include "tessera/base/error.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/grad_scaler.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/recover.h"
#include "tessera/testing/blocks.h"
#include "tessera/testing/net.h"

namespace tessera::testing::recover_test {
namespace {

using ::testing::HasSubstr;

constexpr int kBatches = 6, kBad = 2;

struct Where {
  const char* name;
  int block;     // in whose output the exception comes
  bool forward;  // or in backward
  friend std::ostream& operator<<(std::ostream& out, const Where& where) { return out << where.name; }
};

/// Trains on all batches but the bad one. In that one, if told so, one rank throws, and all catch.
std::vector<at::Tensor> train(const Communicator& world, Residence residence, const Where* where, int culprit) {
  Blocks model;
  for (const auto& block : model.block) fully_shard(block, {.mesh = world, .residence = residence});
  fully_shard(model, {.mesh = world, .residence = residence});
  optim::AdamW optimizer(parameters(model), {.lr = 0.05});
  for (int batch = 0; batch < kBatches; batch++) {
    const bool bad = batch == kBad;
    if (bad && where == nullptr) continue;
    try {
      auto x = numbers({5, 8}, 10 * batch + world.rank());
      for (int i = 0; i < 4; i++) {
        x = model.block[static_cast<size_t>(i)]->forward(x);
        if (!bad || i != where->block || world.rank() != culprit) continue;
        if (where->forward) throw std::runtime_error("a bad batch");
        x.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("a bad batch"); });
      }
      x.pow(2).mean().backward();
      EXPECT_FALSE(bad) << "rank " << world.rank() << " has heard nothing";
      optimizer.step();
      optimizer.zero_grad();
    } catch (const std::exception& error) {
      EXPECT_TRUE(bad) << error.what();
      recover(model);
      for (const auto& shard : parameters(model)) EXPECT_FALSE(shard.grad().defined());
    }
  }
  std::vector<at::Tensor> result;
  for (const auto& shard : parameters(model)) result.push_back(full_parameter(shard));
  return result;
}

class Recovery : public ::testing::TestWithParam<Where> {};

TEST_P(Recovery, GoesOnAsIfTheBatchHadNotBeen) {
  for (const int ranks : {2, 3}) {
    for (const auto residence : {Residence::NodeShared, Residence::Gathered}) {
      for (int culprit = 0; culprit < ranks; culprit++) {
        with_ranks(ranks, [&](const Communicator& world) {
          const auto expected = train(world, residence, nullptr, culprit);
          const auto actual = train(world, residence, &GetParam(), culprit);
          for (size_t i = 0; i < expected.size(); i++) {
            EXPECT_TRUE(at::equal(actual[i], expected[i])) << "parameter " << i << ", " << ranks << " ranks, culprit " << culprit;
          }
        });
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Exceptions, Recovery,
                         ::testing::Values(Where{"InForwardOfTheFirst", 0, true}, Where{"InForwardOfTheThird", 2, true},
                                           Where{"InBackwardOfTheLast", 3, false}, Where{"InBackwardOfTheSecond", 1, false}),
                         ::testing::PrintToStringParamName());

TEST(Recovery, IsOfNoUseAfterDifferentSteps) {
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net();
    fully_shard(net, {.mesh = world, .residence = Residence::Gathered});
    net(input()).sum().backward();
    if (world.rank() == 0) {
      const torch::NoGradGuard no_grad;
      for (auto& shard : parameters(*net)) shard.mul_(1);
    }
    EXPECT_THAT(message_of<CommError>([&] { recover(*net); }), HasSubstr("load a checkpoint"));
  });
}

TEST(Recovery, ForgetsHowTheDroppedGradientsWereScaled) {
  with_ranks(2, [](const Communicator& world) {
    const auto trained = [&](bool breaks_off) {
      auto net = seeded_net();
      fully_shard(net, {.mesh = world});
      optim::SGD optimizer(parameters(*net), {.lr = 0.1});
      optim::GradScaler scaler({.init_scale = 8});
      const auto backward = [&](int number, double most) {
        scaler.scale(net(input(number)).pow(2).sum()).backward();
        scaler.unscale_(optimizer);
        optimizer.clip_grad_norm(most);
      };
      if (breaks_off) {
        backward(1, 1e-6);
        recover(*net);
      }
      backward(2, 1);
      scaler.step(optimizer);
      scaler.update();
      return full_parameter(net->a->weight);
    };
    EXPECT_TRUE(at::equal(trained(true), trained(false)));
  });
}

TEST(Recovery, ChangesNothingWhereNothingWasWrong) {
  with_ranks(3, [](const Communicator& world) {
    auto net = sharded_net(world);
    const auto expected = net(input()).detach();
    recover(*net);
    EXPECT_TRUE(at::equal(net(input()), expected));
  });
}

double trained(const Communicator& world, double shift) {
  auto net = seeded_net();
  fully_shard(net, {.mesh = world, .residence = Residence::Gathered});
  optim::AdamW optimizer(parameters(*net), {.lr = 0.05});
  double loss = 0;
  for (int step = 0; step < 30; step++) {
    const auto value = (net(input(world.rank())) + shift).pow(2).mean();
    value.backward();
    optimizer.step();
    optimizer.zero_grad();
    loss = value.item<double>();
  }
  return loss;
}

TEST(Threads, TrainModelsEachOverAGroupOfItsOwn) {
  with_ranks(2, [](const Communicator& world) {
    const double expected[] = {trained(world, 0), trained(world, 1)};
    const Communicator groups[] = {world.duplicate(), world.duplicate()};
    double actual[2];
    {
      const std::jthread one([&] { actual[0] = trained(groups[0], 0); }), other([&] { actual[1] = trained(groups[1], 1); });
    }
    EXPECT_EQ(actual[0], expected[0]);
    EXPECT_EQ(actual[1], expected[1]);
  });
}

TEST(Threads, ThatShareAGroupAreToldWhatTheyNeed) {
  with_ranks(2, [](const Communicator& world) {
    std::thread([&] { world.barrier(); }).join();
    const auto text = message_of<CommError>([&] { world.barrier({.unit = world.rank() == 0 ? "one" : "other"}); });
    EXPECT_THAT(text, HasSubstr("world.duplicate()"));
  });
}

}  // namespace
}  // namespace tessera::testing::recover_test
