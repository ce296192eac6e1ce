// The engine of one's own passes the checks that all engines pass, and trains with the same bits as another.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "store_engine.h"
#include "tessera/shard/full_params.h"
#include "tests/testing/net.h"
#include "tests/testing/same_tensors.h"

namespace tessera::testing::extending_engine_test {
namespace {

TEST(OwnEngine, KeepsItsPromises) {
  for (const int ranks : {1, 2, 3}) {
    run_world({.transport = "store", .ranks = ranks}, [](const Communicator& world) {
      EXPECT_EQ(world.traits().name, "store");
      for (const auto& check : conformance_checks(world)) EXPECT_NO_THROW(check.run(world)) << check.operation << " " << check.what;
    });
  }
}

/// A net that a world has trained, as rank 0 sees it.
std::vector<at::Tensor> trained_over(const std::string& transport) {
  std::vector<at::Tensor> values;
  run_world({.transport = transport, .ranks = 2}, [&](const Communicator& world) {
    auto net = seeded_net();
    fully_shard(net, {.mesh = world, .residence = Residence::Gathered});
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    for (int step = 0; step < 3; step++) {
      net(input(world.rank() + step)).pow(2).mean().backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    for (const auto& parameter : net->parameters()) {
      const auto value = full_parameter(parameter);
      if (world.is_first()) values.push_back(value.clone());
    }
  });
  return values;
}

TEST(OwnEngine, TrainsWithTheSameBits) {
  const auto values = trained_over("store");
  ASSERT_FALSE(at::equal(values.front(), seeded_net()->parameters().front()));
  expect_same(values, trained_over("threads"));
}

}  // namespace
}  // namespace tessera::testing::extending_engine_test
