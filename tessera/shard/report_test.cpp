// The table of units that describe() makes.
#include "tessera/shard/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>
#include <sstream>

#include "tests/testing/net.h"

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

TEST(Describe, SaysThatNothingIsSharded) {
  EXPECT_THAT(describe(*seeded_net()), ::testing::HasSubstr("call tessera::fully_shard first"));
}

TEST(Describe, CountsParametersApartFromBuffers) {
  with_ranks(2, [](const Communicator& world) {
    torch::nn::Sequential model(torch::nn::Linear(6, 3), torch::nn::BatchNorm1d(3));
    fully_shard(model[0], {.mesh = world});
    fully_shard(model, {.mesh = world});
    EXPECT_THAT(describe(*model), ::testing::HasSubstr("\n27 parameters in 2 units, 7 values in buffers; nothing received\n"));
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

struct OfManyDtypes : torch::nn::Module {
  at::Tensor half = register_parameter("half", torch::zeros({3'000'000}, torch::kBFloat16));
  at::Tensor pairs = register_parameter("pairs", torch::zeros({20}, torch::kComplexDouble));
  at::Tensor plain = register_parameter("plain", torch::zeros({20}, torch::kDouble));
};

struct MixedImpl : torch::nn::Module {
  std::shared_ptr<OfManyDtypes> inner = register_module("a_module_with_quite_a_long_name", std::make_shared<OfManyDtypes>());
  at::Tensor rest = register_parameter("rest", torch::zeros({4}));
};
TORCH_MODULE(Mixed);

TEST(Describe, KeepsItsColumnsWithLongNamesAndDtypes) {
  with_ranks(1, [](const Communicator& world) {
    Mixed model;
    fully_shard(model->inner, {.mesh = world});
    fully_shard(model, {.mesh = world});
    std::istringstream text(describe(*model));
    std::vector<std::string> lines;
    for (std::string line; std::getline(text, line);) lines.push_back(line);
    ASSERT_EQ(lines.size(), 5);  // with the heading, the totals and the peak
    EXPECT_THAT(lines[2], ::testing::HasSubstr("BFloat16+ComplexDouble+Double"));
    for (const auto& line : {lines[1], lines[2]}) {
      EXPECT_EQ(line.size(), lines[0].size());
      const auto residence = lines[0].find("residence"), dtype = lines[0].find("dtype"), parameters = lines[0].find("parameters");
      EXPECT_EQ(line.substr(dtype - 2, 2), "  ");
      EXPECT_NE(line[dtype], ' ');
      EXPECT_EQ(line.substr(residence - 2, 2), "  ");
      EXPECT_NE(line[residence], ' ');
      EXPECT_NE(line[parameters + std::strlen("parameters") - 1], ' ');
    }
  });
}

}  // namespace
}  // namespace tessera::testing::report_test
