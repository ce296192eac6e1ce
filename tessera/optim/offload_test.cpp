// Parameters, gradients and optimizer state on disk: the same bits as in memory. Also in host memory, if a device computes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/parameters.h"
#include "tests/testing/default_device.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"

namespace tessera::testing::offload_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

DiskMemoryOptions on_disk(double fraction = 1) {
  return {.folder = folder_on_disk(), .fraction = fraction};
}

struct Plan {
  OffloadOptions offload = {};
  OffloadTo state = OffloadTo::Nowhere;
  bool in_backward = false;
};

/// The shards after some steps.
std::vector<at::Tensor> trained(const Communicator& world, const Plan& plan) {
  auto net = seeded_net();
  const ShardOptions options{.mesh = world, .offload = plan.offload};
  fully_shard(net->b, options);
  fully_shard(net, options);
  optim::AdamW optimizer(parameters(*net), {.lr = 0.1});
  optimizer.offload_state(plan.state, plan.offload.disk);
  if (plan.in_backward) optimizer.step_in_backward();
  for (int step = 0; step < 3; step++) {
    net->forward(input(world.rank() + step)).pow(2).sum().backward();
    if (!plan.in_backward) clip_grad_norm(parameters(*net), 1);
    optimizer.step();
    optimizer.zero_grad();
  }
  std::vector<at::Tensor> values;
  for (const auto& shard : parameters(*net)) values.push_back(shard.detach().clone());
  return values;
}

TEST(Offload, ChangesNoBit) {
  if (!on_cpu()) GTEST_SKIP() << "host memory alone";
  with_ranks(2, [](const Communicator& world) {
    for (const bool in_backward : {false, true}) {
      const auto expected = trained(world, {.in_backward = in_backward});
      for (const double fraction : {0.4, 1.0}) {
        for (const int what : {1, 2, 4, 7}) {
          const auto to = [&](int bit) { return (what & bit) != 0 ? OffloadTo::Disk : OffloadTo::Nowhere; };
          const auto values = trained(world, {.offload = {.parameters = to(1), .gradients = to(2), .disk = on_disk(fraction)},
                                              .state = to(4),
                                              .in_backward = in_backward});
          for (size_t i = 0; i < values.size(); i++) EXPECT_TRUE(at::equal(values[i], expected[i])) << what << " " << i;
        }
      }
    }
  });
}

/// Runs on GPUs. Waiting for copies is tested on a device that lags, by tests/engine/host_offload_test.cpp.
TEST(Offload, ToHostMemoryTrainsAsOnTheDevice) {
  with_ranks(2, [](const Communicator& world) {
    if (world.traits().device.is_cpu()) GTEST_SKIP() << "ranks are on the CPU";
    for (const bool in_backward : {false, true}) {
      const auto expected = trained(world, {.in_backward = in_backward});
      const auto values =
          trained(world, {.offload = {.parameters = OffloadTo::Host}, .state = OffloadTo::Host, .in_backward = in_backward});
      for (size_t i = 0; i < values.size(); i++) {
        EXPECT_TRUE(values[i].is_cpu());
        EXPECT_TRUE(at::allclose(values[i], expected[i].cpu(), 1e-4, 1e-6)) << i;
      }
    }
  });
}

TEST(Offload, ToHostMemoryIsNothingWhereAllLiesThere) {
  if (!on_cpu()) GTEST_SKIP() << "host memory alone";
  with_ranks(2, [](const Communicator& world) {
    if (!world.traits().device.is_cpu()) GTEST_SKIP() << "there is something to move";
    auto net = seeded_net();
    const auto refused = [&](const OffloadOptions& offload) {
      return message_of<ConfigError>([&] { fully_shard(net, {.mesh = world, .offload = offload}); });
    };
    EXPECT_THAT(refused({.parameters = OffloadTo::Host}), AllOf(HasSubstr("the parameters"), HasSubstr("OffloadTo::Disk")));
    EXPECT_THAT(refused({.gradients = OffloadTo::Host}), AllOf(HasSubstr("the gradients"), HasSubstr("OffloadTo::Disk")));
    EXPECT_THAT(refused({.parameters = OffloadTo::Disk, .disk = {.folder = "/no/such/folder"}}), HasSubstr("/no/such/folder"));
    fully_shard(net, {.mesh = world});
    optim::SGD optimizer(parameters(*net), {.lr = 0.1, .momentum = 0.9});
    EXPECT_THAT(message_of<ConfigError>([&] { optimizer.offload_state(OffloadTo::Host); }), HasSubstr("OffloadTo::Disk"));
    net->forward(input()).sum().backward();
    optimizer.step();
    EXPECT_THAT(message_of<UsageError>([&] { optimizer.offload_state(OffloadTo::Disk, on_disk()); }), HasSubstr("before the first step"));
  });
}

TEST(Offload, OfParametersNeedsUnitsThatAreGathered) {
  if (!on_cpu()) GTEST_SKIP() << "host memory alone";
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net();
    const ShardOptions options{
        .mesh = world, .residence = Residence::NodeShared, .offload = {.parameters = OffloadTo::Disk, .disk = on_disk()}};
    EXPECT_THAT(message_of<ConfigError>([&] { fully_shard(net, options); }), HasSubstr("residence at Auto"));
  });
}

}  // namespace
}  // namespace tessera::testing::offload_test
