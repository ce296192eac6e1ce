// The table of units that describe() makes.
#include "tessera/shard/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/testing/net.h"

namespace tessera::testing::report_test {
namespace {

TEST(Describe, HasALineForEachUnitAndThePeak) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    fully_shard(net, {.mesh = world});
    net(input()).sum().backward();
    EXPECT_THAT(describe(*net), ::testing::AllOf(::testing::HasSubstr("\na "), ::testing::HasSubstr("\nb "),
                                                 ::testing::HasSubstr("peak of unsharded units")));
  });
}

TEST(Describe, ShortensTheNameOfAUnitOfManyModules) {
  with_ranks(1, [](const Communicator& world) {
    torch::nn::ModuleList layers;
    std::vector<std::shared_ptr<torch::nn::Module>> list;
    for (int i = 0; i < 40; i++) {
      list.push_back(torch::nn::Linear(1, 1).ptr());
      layers->push_back(list.back());
    }
    fully_shard(list, {.mesh = world});
    fully_shard(layers, {.mesh = world});
    EXPECT_THAT(describe(*layers),
                ::testing::AllOf(::testing::HasSubstr("\n0+1+2+"), ::testing::HasSubstr("..."), ::testing::HasSubstr("+38+39 ")));
  });
}

}  // namespace
}  // namespace tessera::testing::report_test
