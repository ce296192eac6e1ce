// The moving average of a sharded model equals that of a plain one, and takes the place of the parameters for a while.
#include "tessera/optim/average.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/parameters.h"
#include "tessera/testing/net.h"

namespace tessera::testing::average_test {
namespace {

using optim::Average;
using ::testing::HasSubstr;

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
    for (const auto& [name, shard] : named_parameters(*net)) expected[name] = shard.detach().clone();
    for (int step = 0; step < 3; step++) {
      net->forward(input(world.rank() + step)).pow(2).sum().backward();
      optimizer.step();
      optimizer.zero_grad();
      average.update();
      for (const auto& [name, shard] : named_parameters(*net)) expected[name] = expected[name] * 0.75 + shard.detach().clone() * 0.25;
    }
    std::map<std::string, at::Tensor> own;
    for (const auto& [name, shard] : named_parameters(*net)) own[name] = shard.detach().clone();
    const auto trained = net->forward(input()).detach();
    {
      const auto swapped = average.swapped();
      for (const auto& [name, shard] : named_parameters(*net)) EXPECT_TRUE(at::allclose(shard.detach().clone(), expected[name])) << name;
      const at::NoGradGuard no_grad;
      EXPECT_FALSE(at::allclose(net->forward(input()), trained));
    }
    for (const auto& [name, shard] : named_parameters(*net)) EXPECT_TRUE(at::equal(shard.detach().clone(), own[name])) << name;
    EXPECT_TRUE(at::equal(net->forward(input()), trained));
    average.assign();
    const auto swapped = average.swapped();
    EXPECT_TRUE(at::equal(net->forward(input()), trained));
  });
}

INSTANTIATE_TEST_SUITE_P(Units, Averages,
                         ::testing::Combine(::testing::Values(Residence::Gathered, Residence::NodeShared),
                                            ::testing::Values(std::optional<at::ScalarType>(), at::kBFloat16)));

TEST(Average, RefusesWhatMakesNoSense) {
  const auto net = seeded_net();
  EXPECT_THAT(message_of<UsageError>([&] { Average(net.ptr(), {.decay = 1}); }), HasSubstr("below 1"));
  EXPECT_THAT(message_of<UsageError>([&] { Average(nullptr); }), HasSubstr("give it a model"));
}

}  // namespace
}  // namespace tessera::testing::average_test
