// `tessera xla` as programs and people read it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "tessera/comm/init.h"
#include "tessera/optim/adam.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/wrap.h"
#include "tessera/xla/init.h"
#include "tests/testing/child_task.h"
#include "tests/testing/folder.h"
#include "tests/testing/launched.h"

namespace tessera::testing::cli_xla_test {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

Launched::Ended xla(Command flags, const Environment& environment = {}) {
  flags.insert(flags.begin(), {std::filesystem::path(this_program()).parent_path().parent_path() / "bin/tessera", "xla"});
  return Launched(flags, environment).end();
}

constexpr auto kSum = R"(module @sum { func.func public @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %s = "stablehlo.all_reduce"(%x) <{replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>): %c = "stablehlo.add"(%a, %b) : (tensor<f32>, tensor<f32>) -> tensor<f32> "stablehlo.return"(%c) : (tensor<f32>) -> ()
  }) : (tensor<2xf32>) -> tensor<2xf32>
  return %s : tensor<2xf32>
} })";

TEST(XlaCommand, ListsDevices) {
  const auto ended = xla({"devices", "--devices", "3", "--json"});
  ASSERT_EQ(ended.status, 0) << ended.err;
  EXPECT_EQ(ended.err, "");
  const auto found = nlohmann::json::parse(ended.out);
  EXPECT_EQ(found.at("platform"), "cpu");
  ASSERT_EQ(found.at("devices").size(), 3U);
  EXPECT_EQ(found.at("devices")[2].at("id"), 2);
  EXPECT_THAT(xla({"devices", "--topology", "cpu:5"}).out, ContainsRegex("topology +cpu:5\ndevices +5 of kind cpu"));
}

TEST(XlaCommand, SaysWhatAProgramNeeds) {
  const Folder folder;
  const auto program = (folder / "sum.mlir").string();
  write_file(program, kSum);
  const auto ended = xla({"compile", program, "--topology", "cpu:4", "--json"});
  ASSERT_EQ(ended.status, 0) << ended.err;
  const auto found = nlohmann::json::parse(ended.out);
  EXPECT_EQ(found.at("memory").at("arguments"), 8);
  EXPECT_EQ(found.at("operations").at("all-reduce"), 1);
  EXPECT_TRUE(found.at("notes").empty());
  EXPECT_THAT(xla({"compile", program, "--topology", "cpu:4"}).out, ContainsRegex("replicas +4\n.*all-reduce +1, 8 B\n"));
  const auto small = xla({"compile", program, "--topology", "cpu:2", "--replicas", "4"});
  EXPECT_EQ(small.status, 1);
  EXPECT_THAT(small.err, HasSubstr("4 replicas do not fit on the 2 devices of cpu:2"));
  write_file(program, "module { nonsense }");
  EXPECT_THAT(xla({"compile", program, "--topology", "cpu:4"}).err, HasSubstr("tessera: PJRT plugin"));
}

/// Trains for some steps, as many as the text says, on the world that it is given.
const ChildTask training("train for a compiler", [](const std::string& steps) {
  const auto world = init();
  torch::nn::Sequential model(torch::nn::Linear(64, 64), torch::nn::Linear(64, 64));
  xla::to_device(*model);
  fully_shard(*model, {.mesh = world}, wrap_always());
  optim::AdamW optimizer(parameters(*model), {});
  for (int step = 0; step < std::stoi(steps); step++) {
    std::vector<at::Tensor> batches(world.local_ranks().size(), torch::ones({8, 64}));
    const auto loss = model->forward(world.from_replicas(batches)).pow(2).mean();
    if (steps.ends_with("cut")) std::printf("%g\n", loss.item<float>());
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    if (std::isnan(loss.item<float>())) return 1;
  }
  std::puts("trained");
  return 0;
});

TEST(XlaCommand, CompilesTheStepOfAProgram) {
  const auto compiled = [](const std::string& topology, const char* steps) {
    return xla({"compile", "--json", "--topology", topology, "--", this_program()}, training.environment(steps));
  };
  std::map<int, int64_t> arguments;  // by the number of devices
  for (const int devices : {2, 4}) {
    const auto ended = compiled("cpu:" + std::to_string(devices), "5");
    ASSERT_EQ(ended.status, 0) << ended.err;
    const auto found = nlohmann::json::parse(ended.out);
    EXPECT_EQ(found.at("replicas"), devices);
    EXPECT_EQ(found.at("collectives").at("all-gather").at("count"), 4) << found.at("collectives");
    EXPECT_EQ(found.at("collectives").at("reduce-scatter").at("count"), 4);
    arguments[devices] = found.at("memory").at("arguments");
  }
  EXPECT_NEAR(double(arguments[4]), arguments[2] / 2.0, 2000) << "parameters and moments are sharded, the batch is not";
  const auto cut = nlohmann::json::parse(compiled("cpu:2", "5 cut").out);
  EXPECT_TRUE(cut.at("host_reads").contains("item()")) << cut;
  EXPECT_EQ(cut.at("notes"), nlohmann::json::array({"a step is cut: these are the figures of its largest part"}));
  EXPECT_THAT(xla({"compile", "--topology", "cpu:2", "--", this_program()}, training.environment("5 cut")).out,
              ContainsRegex("cut by +item\\(\\), .* times\nnote +a step is cut: these are the figures of its largest part\n"));
  const auto short_run = compiled("cpu:2", "1");
  EXPECT_EQ(short_run.status, 1);
  EXPECT_THAT(short_run.err, AllOf(HasSubstr("has ended with status 0, and no step with a backward pass was traced twice"), HasSubstr("trained")));
  EXPECT_THAT(xla({"compile", "--topology", "cpu:2", "--", "/no/such/program"}).err, HasSubstr("/no/such/program"));
  EXPECT_THAT(xla({"compile", "--topology", "cpu:2"}).err, HasSubstr("PROGRAM"));
}

const ChildTask drawing("draw for a compiler", [](const std::string&) {
  const auto world = init();
  const auto drawn = torch::rand({4}, torch::TensorOptions(world.traits().device));
  world.step_done();
  return 0;
});

TEST(TracedProgram, DrawsAsItsPluginDoes) {
  for (const auto& [plugin, algorithm] : {std::pair("tpu", "DEFAULT"), {"cpu", "PHILOX"}}) {
    const Folder folder;
    const Environment traced = {{"TESSERA_XLA_TRACE_ONLY", "2"}, {"TESSERA_TRANSPORT", "xla"}, {"TESSERA_PJRT_PLUGIN", plugin},
                                {"TESSERA_XLA_PROGRAMS", folder.path().string()}};
    const auto ended = Launched({this_program()}, drawing.environment({}, traced)).end();
    ASSERT_EQ(ended.status, 0) << ended.err;
    std::string texts;
    for (const auto& file : std::filesystem::directory_iterator(folder.path())) texts += read_file(file.path());
    EXPECT_THAT(texts, HasSubstr(std::string("rng_algorithm ") + algorithm)) << plugin;
  }
}

TEST(XlaCommand, KeepsAStepForARunOnSuchDevices) {
  const Folder folder;
  const auto cache = (folder / "cache").string();
  auto environment = training.environment("5");
  environment["TESSERA_XLA_CACHE"] = cache;
  EXPECT_THAT(xla({"compile", "--topology", "cpu:2", "--", this_program()}, environment).out, HasSubstr("for runs on such devices, in " + cache));
  environment["TESSERA_TRANSPORT"] = "xla";
  environment["TESSERA_XLA_DEVICES"] = "2";
  const auto ended = xla({"program", "--json", this_program()}, environment);
  ASSERT_EQ(ended.status, 0) << ended.err;
  const auto found = nlohmann::json::parse(ended.out);
  int loaded = 0;
  for (const auto& program : found.at("processes").at(0).at("programs")) {
    if (!program.at("has_backward")) continue;
    EXPECT_EQ(program.at("from_disk"), program.at("executions") > 1) << program;
    loaded += program.at("from_disk") ? 1 : 0;
  }
  EXPECT_EQ(loaded, 1);
}

TEST(XlaCommand, NamesWhatIsWrong) {
  const auto says = [](const Command& flags, const Environment& environment = {}) {
    const auto ended = xla(flags, environment);
    EXPECT_EQ(ended.status, 1) << ended.err;
    return ended.err;
  };
  EXPECT_THAT(says({"devices", "--plugin", "abacus"}), HasSubstr("tessera: no PJRT plugin is named 'abacus'"));
  EXPECT_THAT(says({"devices", "--plugin", "cpu", "--topology", "v5p:2x2x1"}), HasSubstr("can't make the topology 'v5p:2x2x1'"));
  EXPECT_THAT(says({"devices", "--topology", "nonsense"}),
              AllOf(HasSubstr("no plugin is known for the topology 'nonsense'"), HasSubstr("v5p:2x2x1"), HasSubstr("cpu (xla-cpu-pjrt)")));
  EXPECT_THAT(says({"devices", "--topology", "verse:2x2"}), HasSubstr("the topology 'verse:2x2'"));
  EXPECT_THAT(says({"devices", "--topology", "h100"}), HasSubstr("the topology 'h100' does not say how many"));
  EXPECT_THAT(says({"devices", "--topology", "h100:0x2x8"}), HasSubstr("write h100:1x2x8"));
  EXPECT_THAT(says({"devices", "--topology", "cpu:4,fast=1"}), HasSubstr("the topology 'cpu:4' takes no options: leave 'fast' out"));
  EXPECT_THAT(says({"compile", "--topology", "cpu:1", "--", "/bin/true"}), HasSubstr("It printed nothing"));
  EXPECT_THAT(says({"devices", "--topology", "cpu:some"}), HasSubstr("write cpu:8"));
  EXPECT_THAT(says({"compile", "no/such.mlir", "--topology", "cpu:1"}), HasSubstr("no/such.mlir"));
  EXPECT_THAT(says({"devices"}, {{"XLA_FLAGS", "--xla_no_such"}}), AllOf(HasSubstr("the plugin has ended its process"), HasSubstr("xla_no_such")));
}

}  // namespace
}  // namespace tessera::testing::cli_xla_test
