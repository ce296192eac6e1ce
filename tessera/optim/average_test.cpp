// The moving average of a sharded model equals that of a plain one, and takes the place of the parameters for a while.
#include "tessera/optim/average.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include "tessera/base/error.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/local.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/recover.h"
#include "tests/testing/net.h"
#include "tests/testing/residences.h"

namespace tessera::testing::average_test {
namespace {

using optim::Average;
using ::testing::AllOf;
using ::testing::HasSubstr;

at::Tensor values_of(const at::Tensor& shard) {
  return to_local(shard.detach()).clone();
}

class Averages : public ::testing::TestWithParam<std::tuple<Residence, std::optional<at::ScalarType>>> {};

TEST_P(Averages, EqualThoseOfAPlainModel) {
  const auto [residence, dtype] = GetParam();
  with_ranks(3, [&, residence = residence, dtype = dtype](const Communicator& world) {
    auto net = seeded_net();
    const ShardOptions options{.mesh = world, .mixed_precision = {.param_dtype = dtype}, .residence = residence};
    fully_shard(net->b, options);
    fully_shard(net, options);
    optim::SGD optimizer(parameters(*net), {.lr = 0.1});
    Average average(net.ptr(), {.decay = 0.75});
    std::map<std::string, at::Tensor> expected;
    for (const auto& [name, shard] : named_parameters(*net)) expected[name] = values_of(shard);
    for (int step = 0; step < 3; step++) {
      net->forward(input(world.rank() + step)).pow(2).sum().backward();
      optimizer.step();
      optimizer.zero_grad();
      average.update();
      for (const auto& [name, shard] : named_parameters(*net)) expected[name] = expected[name] * 0.75 + values_of(shard) * 0.25;
    }
    std::map<std::string, at::Tensor> own;
    for (const auto& [name, shard] : named_parameters(*net)) own[name] = values_of(shard);
    const auto trained = net->forward(input()).detach();
    {
      const auto swapped = average.swapped();
      for (const auto& [name, shard] : named_parameters(*net)) EXPECT_TRUE(at::allclose(values_of(shard), expected[name])) << name;
      const at::NoGradGuard no_grad;
      EXPECT_FALSE(at::allclose(net->forward(input()), trained));
    }
    for (const auto& [name, shard] : named_parameters(*net)) EXPECT_TRUE(at::equal(values_of(shard), own[name])) << name;
    EXPECT_TRUE(at::equal(net->forward(input()), trained));
    average.assign();
    const auto swapped = average.swapped();
    EXPECT_TRUE(at::equal(net->forward(input()), trained));
  });
}

INSTANTIATE_TEST_SUITE_P(Units, Averages,
                         ::testing::Combine(::testing::ValuesIn(residences()),
                                            ::testing::Values(std::optional<at::ScalarType>(), at::kBFloat16)));

TEST(Average, IsFinerThanTheParameters) {
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net();
    net->to(at::kBFloat16);
    fully_shard(net, {.mesh = world, .listing = Listing::Flat});
    Average average(net.ptr(), {.decay = 0.999});
    const at::NoGradGuard no_grad;
    for (auto& shard : parameters(*net)) shard.fill_(1);
    average.assign();
    for (auto& shard : parameters(*net)) shard.fill_(2);
    for (int step = 0; step < 1000; step++) average.update();
    const auto swapped = average.swapped();
    for (const auto& shard : parameters(*net)) EXPECT_NEAR(values_of(shard).flatten()[0].item<double>(), 2 - std::pow(0.999, 1000), 0.01);
  });
}

TEST(Average, RefusesToChangeWhileItIsInUse) {
  auto net = seeded_net();
  Average average(net.ptr());
  const auto swapped = average.swapped();
  EXPECT_THAT(message_of<UsageError>([&] { average.update(); }), HasSubstr("Average::update was called while"));
  EXPECT_THAT(message_of<UsageError>([&] { average.assign(); }), HasSubstr("Average::assign was called while"));
  EXPECT_THAT(message_of<UsageError>([&] { (void)average.swapped(); }), HasSubstr("Average::swapped was called while"));
}

TEST(Average, RefusesStepsThatWouldBeLost) {
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net();
    fully_shard(net, {.mesh = world});
    optim::SGD ours(parameters(*net), {.lr = 0.1});
    torch::optim::SGD theirs(parameters(*net), 0.1);
    Average average(net.ptr());
    const auto before = values_of(parameters(*net).front()).clone();
    {
      const auto swapped = average.swapped();
      net->forward(input(0)).sum().backward();
      EXPECT_THAT(message_of<UsageError>([&] { ours.step(); }), HasSubstr("a moving average in place of its own parameters"));
      EXPECT_THAT(message_of<UsageError>([&] { theirs.step(); }), HasSubstr("would be lost"));
      EXPECT_THAT(message_of<UsageError>([&] { const auto writes = full_params(*net, Access::Write); }), HasSubstr("would be lost"));
      ours.zero_grad();
    }
    EXPECT_TRUE(torch::equal(values_of(parameters(*net).front()), before));
    net->forward(input(0)).sum().backward();
    ours.step();
  });
}

TEST(Average, IsRestoredAfterAnException) {
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net();
    fully_shard(net, {.mesh = world});
    optim::SGD optimizer(parameters(*net), {.lr = 0.1});
    Average average(net.ptr());
    const auto before = values_of(parameters(*net).front()).clone();
    for (auto& shard : parameters(*net)) at::Tensor(shard).detach().add_(1);
    try {
      const auto swapped = average.swapped();
      throw UsageError("evaluation failed");
    } catch (const UsageError&) {
    }
    recover(*net);
    EXPECT_TRUE(torch::equal(values_of(parameters(*net).front()), before));
    EXPECT_THAT(message_of<UsageError>([&] { average.update(); }), HasSubstr("Average::update was called while"));
    average.restore();
    EXPECT_TRUE(torch::equal(values_of(parameters(*net).front()), before + 1));
    average.update();
    net->forward(input(0)).sum().backward();
    optimizer.step();
  });
}

TEST(Average, OfRanksThatDifferIsTold) {
  const auto expect_told = [](bool decays_differ) {
    with_ranks(2, [&](const Communicator& world) {
      auto net = seeded_net();
      fully_shard(net, {.mesh = world});
      Average average(net.ptr(), {.decay = decays_differ && !world.is_first() ? 0.9 : 0.99});
      if (!decays_differ && world.is_first()) average.update();
      const auto own = !decays_differ && world.is_first()   ? "decay 0.99 after 1 updates"
                       : decays_differ && !world.is_first() ? "decay 0.9 after 0 updates"
                                                            : "decay 0.99 after 0 updates";
      EXPECT_THAT(message_of<DisagreementError>([&] { (void)average.swapped(); }), HasSubstr(own));
    });
  };
  expect_told(true);
  expect_told(false);
}

TEST(Average, IsUsableAgainAfterAnExceptionOnceItIsLoaded) {
  auto net = seeded_net();
  Average average(net.ptr());
  try {
    const auto swapped = average.swapped();
    throw UsageError("evaluation failed");
  } catch (const UsageError&) {
  }
  EXPECT_THAT(message_of<UsageError>([&] { average.update(); }), HasSubstr("Average::update was called while"));
  EXPECT_EQ(average.state(*net).size(), 6U);
  average.was_loaded();
  average.update();
  const auto swapped = average.swapped();
}

TEST(Average, IsMadeOfShards) {
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net();
    Average early(net.ptr());
    fully_shard(net->b, {.mesh = world});
    fully_shard(net, {.mesh = world});
    const auto refused = HasSubstr("made before fully_shard");
    EXPECT_THAT(message_of<UsageError>([&] { early.update(); }), refused);
    EXPECT_THAT(message_of<UsageError>([&] { early.assign(); }), refused);
    EXPECT_THAT(message_of<UsageError>([&] { (void)early.swapped(); }), refused);
    EXPECT_THAT(message_of<UsageError>([&] { (void)early.state(*net); }), refused);
    EXPECT_THAT(message_of<UsageError>([&] { early.expect_savable(); }), refused);
  });
}

TEST(Average, StaysAwayWhileAnotherTakesThePlaceOfItsParameters) {
  const auto expect_refusals = [](Net& net) {
    Average one(net.ptr()), other(net.ptr()), part(net->b.ptr());
    const auto before = values_of(parameters(*net).front());
    for (auto& shard : parameters(*net)) at::Tensor(shard).detach().add_(1);
    const auto refused = HasSubstr("while the model has another Average in place of its own parameters");
    {
      const auto swapped = one.swapped();
      for (auto* const average : {&other, &part}) {
        EXPECT_THAT(message_of<UsageError>([&] { average->update(); }), refused);
        EXPECT_THAT(message_of<UsageError>([&] { average->assign(); }), refused);
        EXPECT_THAT(message_of<UsageError>([&] { (void)average->swapped(); }), refused);
        EXPECT_THAT(message_of<UsageError>([&] { average->expect_savable(); }), refused);
      }
      EXPECT_THAT(message_of<UsageError>([&] { Average(net.ptr()); }), refused);
      EXPECT_TRUE(torch::equal(values_of(parameters(*net).front()), before));
    }
    EXPECT_TRUE(torch::equal(values_of(parameters(*net).front()), before + 1));
    other.update();
    const auto swapped = other.swapped();
  };
  auto plain = seeded_net();
  expect_refusals(plain);
  with_ranks(2, [&](const Communicator& world) {
    auto net = seeded_net();
    fully_shard(net->b, {.mesh = world});
    fully_shard(net, {.mesh = world});
    expect_refusals(net);
  });
}

TEST(Average, RefusesWhatMakesNoSense) {
  const auto net = seeded_net();
  EXPECT_THAT(message_of<UsageError>([&] { Average(net.ptr(), {.decay = 1}); }), HasSubstr("below 1"));
  EXPECT_THAT(message_of<UsageError>([&] { Average(nullptr); }), HasSubstr("give it a model"));
}

}  // namespace
}  // namespace tessera::testing::average_test
