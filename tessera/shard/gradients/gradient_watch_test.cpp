// Ranks must do the same between backward passes: clear gradients, train parameters in no unit, and evaluate.
#include "tessera/shard/gradients/gradient_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/reduction.h"
#include "tests/testing/default_device.h"
#include "tests/testing/net.h"
#include "tests/testing/residences.h"

namespace tessera::testing::gradient_watch_test {
namespace {

namespace nn = torch::nn;
using ::testing::AllOf;
using ::testing::HasSubstr;

at::Tensor loss_of(Net& net, const Communicator& world) {
  return net(input(world.rank())).pow(2).sum();
}

void with_residences(const std::function<void(const Communicator& world, Residence residence)>& act) {
  for (const auto residence : residences()) {
    with_ranks(3, [&](const Communicator& world) { act(world, residence); });
  }
}

TEST(EarlierGradients, AreClearedOnAllRanksOrOnNone) {
  with_residences([](const Communicator& world, Residence residence) {
    auto net = seeded_net();
    fully_shard(net, {.mesh = world, .residence = residence});
    const auto shards = parameters(*net);
    for (int pass = 0; pass < 3; pass++) loss_of(net, world).backward();
    for (const auto& shard : shards) world.rank() == 0 ? shard.mutable_grad().reset() : (void)shard.mutable_grad().zero_();
    loss_of(net, world).backward();
    for (const auto& shard : shards) shard.mutable_grad().mul_(2);
    loss_of(net, world).backward();
    if (world.rank() == 1) shards[0].mutable_grad().reset();
    EXPECT_THAT(message_of<DisagreementError>([&] { loss_of(net, world).backward(); }),
                AllOf(HasSubstr("ranks 0 and 2 at operation"), HasSubstr("Net, added to 6 earlier gradients"),
                      HasSubstr("Net, added to 5 earlier gradients"), HasSubstr("call zero_grad() on every rank or on none")));
  });
}

TEST(EarlierGradients, ThatWaitForAReductionAreDroppedOnAllRanksOrOnNone) {
  with_residences([](const Communicator& world, Residence residence) {
    auto net = seeded_net();
    fully_shard(net, {.mesh = world, .residence = residence});
    optim::SGD optimizer(parameters(*net), {.lr = 0.1});
    const auto accumulate = [&] {
      const auto local = no_sync(*net);
      loss_of(net, world).backward();
    };
    accumulate();
    optimizer.zero_grad();
    loss_of(net, world).backward();
    optimizer.step();
    optimizer.zero_grad();
    accumulate();
    if (world.rank() == 2) optimizer.zero_grad();
    EXPECT_THAT(message_of<DisagreementError>([&] { loss_of(net, world).backward(); }),
                AllOf(HasSubstr("after earlier gradients were dropped"), HasSubstr("call zero_grad() on every rank or on none")));
  });
}

/// A model of which the last layer is in no unit.
struct Forgotten {
  Forgotten(const Communicator& world, Residence residence) {
    for (const auto& layer : {net->a, net->b}) fully_shard(layer, {.mesh = world, .residence = residence});
    optimizer.emplace(net->parameters(), torch::optim::AdamWOptions(0.1));
  }
  void step() {
    optimizer->step();
    optimizer->zero_grad();
  }
  Net net = seeded_net();
  std::optional<torch::optim::AdamW> optimizer;
};

TEST(TrainedBeside, IsRefusedWhenTheRanksHaveComeToDiffer) {
  with_residences([](const Communicator& world, Residence residence) {
    Forgotten run(world, residence);
    loss_of(run.net, world).backward();
    run.step();
    EXPECT_THAT(
        message_of<DisagreementError>([&] { loss_of(run.net, world).backward(); }),
        AllOf(HasSubstr("the ranks train tensors in no unit to different values: rank 0 beside a tensor of shape [4, 10] and 1 more #"),
              HasSubstr("call fully_shard for the whole model last, or tessera::average_gradients")));
  });
}

TEST(TrainedBeside, IsRefusedAlsoWhereGradientsAreAccumulated) {
  with_residences([](const Communicator& world, Residence residence) {
    Forgotten run(world, residence);
    const auto step = [&] {
      {
        const auto local = no_sync(*run.net);
        loss_of(run.net, world).backward();
      }
      loss_of(run.net, world).backward();
      run.step();
    };
    step();
    EXPECT_THAT(message_of<DisagreementError>([&] {
                  for (int i = 0; i < 4; i++) step();
                }),
                HasSubstr("the ranks train tensors in no unit to different values"));
  });
}

TEST(TrainedBeside, MayBeAveragedByTheProgram) {
  with_residences([](const Communicator& world, Residence residence) {
    Forgotten run(world, residence);
    for (int step = 0; step < 6; step++) {
      loss_of(run.net, world).backward();
      average_gradients(run.net->c->parameters(), world);
      run.step();
    }
    loss_of(run.net, world).backward();
    // From here on the program forgets to average. The watch notices that at the eighth change, the next one that it reads.
    EXPECT_THAT(message_of<DisagreementError>([&] {
                  for (int step = 0; step < 10; step++) {
                    run.step();
                    loss_of(run.net, world).backward();
                  }
                }),
                HasSubstr("[4, 10]"));
  });
}

TEST(TrainedBeside, DoesNotMeanInputs) {
  with_residences([](const Communicator& world, Residence residence) {
    auto net = seeded_net();
    fully_shard(net, {.mesh = world, .residence = residence});
    const auto shards = parameters(*net);
    const auto x = input(world.rank()).requires_grad_();
    for (int pass = 0; pass < 4; pass++) {
      const auto by_itself = input(world.rank() + pass).requires_grad_();  // another tensor in each pass
      net(by_itself).sum().backward();
      const auto uphill = torch::autograd::grad({net(x).sum()}, {x})[0];
      const torch::NoGradGuard no_grad;
      x.add_(uphill);
    }
  });
}

TEST(Evaluations, OfAPartOfTheRanksAreRemarkedOnceWhereTheyWork) {
  if (!on_cpu()) GTEST_SKIP() << "no device shares memory";
  std::vector<std::string> lines;
  auto before = set_log_sink([&](const LogRecord& record) { lines.emplace_back(record.text); });
  with_ranks(3, [](const Communicator& world) {
    auto net = seeded_net();
    fully_shard(net, {.mesh = world, .residence = Residence::NodeShared});
    for (int pass = 0; pass < 4; pass++) {
      {
        const torch::NoGradGuard no_grad;
        for (int batch = 0; batch <= world.rank(); batch++) net(input(batch));  // all ranks evaluate, but over different numbers of batches
      }
      loss_of(net, world).backward();
    }
  });
  set_log_sink(std::move(before));
  EXPECT_THAT(lines, ::testing::IsEmpty());
  before = set_log_sink([&](const LogRecord& record) { lines.emplace_back(record.text); });
  with_ranks(3, [](const Communicator& world) {
    auto net = seeded_net();
    fully_shard(net, {.mesh = world, .residence = Residence::NodeShared});
    for (int pass = 0; pass < 3; pass++) {
      loss_of(net, world).backward();
      const torch::NoGradGuard no_grad;
      if (world.rank() == 1) net(input());
    }
  });
  set_log_sink(std::move(before));
  EXPECT_THAT(lines, ::testing::ElementsAre(HasSubstr("rank 1 evaluated the model without the other ranks")));
}

}  // namespace
}  // namespace tessera::testing::gradient_watch_test
