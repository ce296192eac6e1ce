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
    fully_shard(model, {.mesh = world, .residence = Residence::Gathered});
    EXPECT_THAT(describe(*model), ::testing::EndsWith(R"(
advice: The model is one unit, so that all 6342.1 kB of its parameters are whole at
  once. With 6 modules of class WideBlock as units, of at most 1057.0 kB each, the peak
  would be 2114.0 kB in place of 6342.1 kB.
    tessera::fully_shard(model, options, tessera::wrap_classes({"WideBlock"}));
)"));
  });
}

TEST(Describe, SaysWhatUnitsCostAndHasNoAdviceForAModelThatIsDividedWell) {
  with_ranks(2, [](const Communicator& world) {
    auto model = wide_blocks();
    fully_shard(model, {.mesh = world, .residence = Residence::Gathered}, wrap_classes({"WideBlock"}));
    for (int i = 0; i < 3; i++) model->forward(torch::ones({2, 64})).sum().backward();
    EXPECT_THAT(describe(*model),
                ::testing::AllOf(::testing::HasSubstr("\na step  of the peak"), ::testing::HasSubstr(" 2.0  1057.0 kB\n"),
                                 ::testing::HasSubstr("\n... and 1 more\n"), ::testing::Not(::testing::HasSubstr("advice"))));
  });
}

/// A model of a root and four blocks, as on one of two ranks.
ModelFacts divided_well() {
  ModelFacts model{.units = {{.name = "Net", .bytes = 8'000'000}}, .ranks = 2, .steps = 10};
  for (const std::string name : {"a", "b", "c", "d"}) {
    model.units.push_back(
        {.name = name, .class_name = "Block", .bytes = 10'000'000, .depth = 1, .gathers = 2, .received = 10e6, .parts = {}});
  }
  return model;
}

std::vector<std::string> kinds_of(const ModelFacts& model) {
  std::vector<std::string> kinds;
  for (const auto& item : advice_for(model)) kinds.push_back(item.kind);
  return kinds;
}

TEST(Advice, IsNotGivenToAModelThatIsDividedWell) {
  EXPECT_THAT(kinds_of(divided_well()), ::testing::IsEmpty());
  EXPECT_EQ(expected_peak(divided_well().units), 28'000'000u);
  auto alone = divided_well();
  alone.ranks = 1;
  alone.misses = 100;
  EXPECT_THAT(kinds_of(alone), ::testing::IsEmpty());
}

TEST(Advice, NamesAUnitThatIsTooLargeAndWhatItsPartsWouldSave) {
  auto model = divided_well();
  auto& large = model.units[2];
  large.bytes = 60'000'000;
  large.parts = {3, {.path = "b.0", .class_name = "Inner", .bytes = 20'000'000}};
  const auto advice = advice_for(model);
  ASSERT_EQ(advice.size(), 1);
  EXPECT_EQ(advice[0].unit, "b");
  EXPECT_THAT(advice[0].text, ::testing::HasSubstr("the peak would be 48.0 MB in place of 78.0 MB"));
  EXPECT_EQ(advice[0].change, "tessera::fully_shard(model, options, tessera::wrap_classes({\"Block\", \"Inner\"}));");
  large.parts.clear();
  EXPECT_THAT(kinds_of(model), ::testing::IsEmpty()) << "a layer that can't be divided";
  large.class_name.clear();
  EXPECT_THAT(kinds_of(model), ::testing::ElementsAre("large unit")) << "nothing is known about its parts";
}

TEST(Advice, CountsTheCollectivesThatMergingSmallUnitsSaves) {
  auto model = divided_well();
  for (auto& unit : model.units) unit.bytes = 1000;
  const auto advice = advice_for(model);
  ASSERT_EQ(advice.size(), 1);
  EXPECT_THAT(advice[0].text, ::testing::HasSubstr("As 1 unit they would save 9 of 12 collectives a step"));
  EXPECT_THAT(advice[0].change, ::testing::HasSubstr("policy.merge_below = 400000;"));
  for (auto& unit : model.units) unit.is_node_shared = true;
  EXPECT_THAT(kinds_of(model), ::testing::IsEmpty());
}

TEST(Advice, NamesFrozenUnitsUnitsUsedOftenAndOrdersThatChange) {
  auto model = divided_well();
  model.units[1].is_frozen = true;
  model.units[4].gathers = 4;
  model.units[4].is_tied = true;
  model.misses = 10;
  model.cancelled = 30;
  EXPECT_THAT(kinds_of(model), ::testing::ElementsAre("frozen units", "unit used often", "order changes", "prefetches lost"));
  const auto advice = advice_for(model);
  EXPECT_EQ(advice[0].change, "options.replicated = tessera::parameters_of_modules(*model, \"a\");");
  EXPECT_THAT(advice[1].text, ::testing::HasSubstr("is gathered 4.0 times a step, other units 2.0 times, because its tied parameters are"));
  EXPECT_EQ(advice[3].change, "options.schedule.forward_prefetch = false;");
}

}  // namespace
}  // namespace tessera::testing::report_test
