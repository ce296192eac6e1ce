// The key of one's own is one of the table, and changes what a step does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tessera/train/trainer.h"
#include "tests/testing/net.h"

namespace tessera::testing::extending_configuration_key_test {
namespace {

/// Returns how far a step moves a net by norm `p` if the settings limit its gradients to 0.01.
double moved(const std::map<std::string, std::string>& settings, double p) {
  double most = 0;
  with_ranks(2, [&](const Communicator& world) {
    auto all = settings;
    all["gradient_clipping"] = "0.01";
    Trainer trainer({.world = world, .settings = all});
    auto net = seeded_net();
    trainer.prepare(net);
    optim::SGD optimizer(parameters(*net), {.lr = 1});
    trainer.prepare(optimizer);
    const auto before = trainer.get_state_dict(*net);
    trainer.backward(net(input(world.rank())).pow(2).sum());
    trainer.step();
    const auto after = trainer.get_state_dict(*net);
    std::vector<at::Tensor> steps;
    for (const auto& [name, value] : after) steps.push_back((value - before.at(name)).flatten());
    if (world.is_first()) most = at::cat(steps).norm(p).item<double>();
  });
  return most;
}

TEST(OwnConfigurationKey, ChangesWhatAStepDoes) {
  EXPECT_NEAR(moved({}, 2), 0.01, 1e-5);
  EXPECT_NEAR(moved({{"tessera_clip_norm", "1"}}, 1), 0.01, 1e-5);
  EXPECT_LT(moved({{"tessera_clip_norm", "1"}}, 2), 0.005);
}

TEST(OwnConfigurationKey, RefusesOtherValues) {
  EXPECT_THAT(message_of<ConfigError>([] { moved({{"tessera_clip_norm", "0"}}, 2); }), ::testing::HasSubstr("tessera_clip_norm"));
}

}  // namespace
}  // namespace tessera::testing::extending_configuration_key_test
