// The optimizer of one's own takes the steps of torch's, and on shards the same ones as on whole parameters.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "rms_prop.h"
#include "tessera/shard/full_params.h"
#include "tests/testing/net.h"
#include "tests/testing/same_tensors.h"

namespace tessera::testing::extending_optimizer_test {
namespace {

constexpr int kSteps = 5;

template <class Optimizer>
void take_steps(Net& net, Optimizer& optimizer) {
  for (int step = 0; step < kSteps; step++) {
    net(input(step)).pow(2).mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

TEST(OwnOptimizer, TakesTheStepsOfTorch) {
  auto ours = seeded_net(), theirs = seeded_net();
  own::RmsProp optimizer(ours->parameters(), {.lr = 0.01, .weight_decay = 0.1});
  torch::optim::RMSprop reference(theirs->parameters(), torch::optim::RMSpropOptions(0.01).weight_decay(0.1));
  take_steps(ours, optimizer);
  take_steps(theirs, reference);
  expect_same(ours->parameters(), theirs->parameters());
}

TEST(OwnOptimizer, TakesTheSameStepsOnShards) {
  auto whole = seeded_net();
  own::RmsProp reference(whole->parameters(), {.weight_decay = 0.1});
  take_steps(whole, reference);
  with_ranks(2, [&](const Communicator& world) {
    auto net = sharded_net(world);
    own::RmsProp optimizer(net->parameters(), {.weight_decay = 0.1});
    take_steps(net, optimizer);
    std::vector<at::Tensor> values;
    for (const auto& parameter : net->parameters()) values.push_back(full_parameter(parameter));
    expect_same(values, whole->parameters());
    EXPECT_EQ(optimizer.state(*net).at("a.weight").count("square_avg"), 1);
  });
}

}  // namespace
}  // namespace tessera::testing::extending_optimizer_test
