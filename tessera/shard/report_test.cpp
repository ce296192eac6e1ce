// The table of units that describe() makes, and its advice.
#include "tessera/shard/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>
#include <sstream>

#include "tessera/shard/advice.h"
#include "tessera/shard/wrap.h"
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

TEST(Describe, TakesAModelThatNoSharedPointerOwns) {
  with_ranks(2, [](const Communicator& world) {
    NetImpl net;
    fully_shard(net, {.mesh = world});
    EXPECT_THAT(describe(net), ::testing::HasSubstr("\n224 parameters in 1 unit"));
  });
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

struct WideBlockImpl : torch::nn::Module {
  torch::nn::Linear up{nullptr}, down{nullptr};
  WideBlockImpl() {
    up = register_module("up", torch::nn::Linear(64, 2048));
    down = register_module("down", torch::nn::Linear(2048, 64));
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::relu(up(x))); }
};
TORCH_MODULE(WideBlock);

torch::nn::Sequential wide_blocks() {
  torch::nn::Sequential model;
  for (int i = 0; i < 6; i++) model->push_back(WideBlock());
  return model;
}

TEST(Describe, AdvisesAModelOfOneUnitToMakeUnitsOfItsBlocks) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = wide_blocks();
    fully_shard(model, {.mesh = world, .start = Start::FromRank0, .residence = Residence::Gathered});
    EXPECT_THAT(describe(*model), ::testing::EndsWith(R"(
advice: The model is one unit. 6.34 MB of its parameters are whole at once, 100 % of the
  peak of unsharded units. With 6 modules of class WideBlock as units, of at most 1.06
  MB each, the peak would be 2.11 MB in place of 6.34 MB.
    tessera::fully_shard(model, options, tessera::wrap_classes({"WideBlock"}));
)"));
  });
}

TEST(Describe, SaysWhatUnitsCostAndHasNoAdviceForAModelThatIsDividedWell) {
  with_ranks(2, [](const Communicator& world) {
    auto model = wide_blocks();
    fully_shard(model, {.mesh = world, .start = Start::FromRank0, .residence = Residence::Gathered}, wrap_classes({"WideBlock"}));
    for (int i = 0; i < 3; i++) model->forward(torch::ones({2, 64})).sum().backward();
    EXPECT_THAT(describe(*model),
                ::testing::AllOf(::testing::HasSubstr("         6   3.18 MB\n"), ::testing::Not(::testing::HasSubstr("advice"))));
  });
}

/// A root and four blocks.
std::vector<UnitFigures> divided_well() {
  std::vector<UnitFigures> units = {{.name = "Net", .unsharded = 8'000'000}};
  for (const std::string name : {"a", "b", "c", "d"})
    units.push_back({.name = name, .class_name = "Block", .unsharded = 10'000'000, .depth = 1, .parts = {}});
  return units;
}

std::vector<std::string> names_of(const std::vector<Advice>& advice) {
  std::vector<std::string> names;
  for (const auto& item : advice) names.push_back(item.name);
  return names;
}

TEST(Advice, IsNotGivenToAModelThatIsDividedWell) {
  EXPECT_THAT(names_of(advice_on_units(divided_well())), ::testing::IsEmpty());
}

TEST(Advice, NamesAUnitThatIsTooLargeAndWhatItsPartsWouldSave) {
  auto units = divided_well();
  auto& large = units[2];
  large.unsharded = 60'000'000;
  large.parts = {3, {.class_name = "Inner", .bytes = 20'000'000}};
  const auto advice = advice_on_units(units);
  ASSERT_EQ(advice.size(), 1);
  EXPECT_EQ(advice[0].units, std::vector<std::string>{"b"});
  EXPECT_THAT(advice[0].evidence, ::testing::HasSubstr("the peak would be 48 MB in place of 78 MB"));
  EXPECT_EQ(advice[0].change, "tessera::fully_shard(model, options, tessera::wrap_classes({\"Block\", \"Inner\"}));");
  large.parts.clear();
  EXPECT_THAT(names_of(advice_on_units(units)), ::testing::IsEmpty()) << "a layer that can't be divided";
  large.class_name.clear();
  EXPECT_THAT(names_of(advice_on_units(units)), ::testing::ElementsAre("unit-too-large")) << "nothing is known about its parts";
  EXPECT_THAT(names_of(advice_on_units(units, 1e9)), ::testing::IsEmpty()) << "measured: it costs little";
  large.waits = 0.2;
  EXPECT_THAT(names_of(advice_on_units(units, 1e9)), ::testing::ElementsAre("unit-too-large"));
}

TEST(Advice, CountsTheCollectivesThatMergingSmallUnitsSaves) {
  auto units = divided_well();
  for (auto& unit : units) unit.unsharded = 1000;
  const auto advice = advice_on_units(units);
  ASSERT_EQ(advice.size(), 1);
  EXPECT_THAT(advice[0].evidence, ::testing::HasSubstr("As 1 unit they would save 9 collectives a step"));
  EXPECT_THAT(advice[0].change, ::testing::HasSubstr("policy.merge_below = 400000;"));
  EXPECT_THAT(names_of(advice_on_units(units, 1e9)), ::testing::IsEmpty()) << "measured: nobody waits for them";
  for (auto& unit : units) unit.unsharded = 0;
  EXPECT_THAT(names_of(advice_on_units(units)), ::testing::IsEmpty()) << "node-shared";
}

}  // namespace
}  // namespace tessera::testing::report_test
