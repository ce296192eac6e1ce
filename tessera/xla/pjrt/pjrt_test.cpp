// The client over PJRT, on each CPU plugin that is installed.
#include "tessera/base/atomic_write.h"
#include "tessera/base/error.h"
#include "tessera/xla/pjrt/client.h"
#include "tessera/xla/pjrt/gpus.h"
#include "tessera/xla/pjrt/program_cache.h"
#include "tessera/xla/pjrt/topology.h"
#include "tessera/xla/pjrt/wire.h"
#include "tests/testing/folder.h"
#include "tests/testing/transports.h"
#include "tests/testing/warnings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>

namespace tessera::pjrt {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;

std::vector<std::string> cpu_plugins() {
  std::vector<std::string> files;
  for (const auto& plugin : installed_plugins()) {
    if (plugin.name == "cpu") files.push_back(plugin.file.string());
  }
  return files;
}

class OnPlugin : public ::testing::TestWithParam<std::string> {
 protected:
  Client client(int devices = 1) { return Client(Plugin::load(GetParam()), {.devices = devices}); }
};
INSTANTIATE_TEST_SUITE_P(Cpu, OnPlugin, ::testing::ValuesIn(cpu_plugins()),
                         [](const auto& info) { return std::filesystem::path(info.param).stem().string(); });

/// w - lr * g, in the place of w.
Program update() {
  return {
      R"(module { func.func public @main(%w: tensor<2x3xf32> {tf.aliasing_output = 0 : i32}, %g: tensor<2x3xf32>, %lr: tensor<f32>) -> tensor<2x3xf32> {
    %b = "stablehlo.broadcast_in_dim"(%lr) <{broadcast_dimensions = array<i64>}> : (tensor<f32>) -> tensor<2x3xf32>
    %s = "stablehlo.multiply"(%b, %g) : (tensor<2x3xf32>, tensor<2x3xf32>) -> tensor<2x3xf32>
    %r = "stablehlo.subtract"(%w, %s) : (tensor<2x3xf32>, tensor<2x3xf32>) -> tensor<2x3xf32>
    return %r : tensor<2x3xf32>
  } })",
      {{{at::kFloat, {2, 3}}, true}, {{at::kFloat, {2, 3}}}, {{at::kFloat, {}}}}};
}

TEST_P(OnPlugin, AProgramRunsAndDonates) {
  const auto xla = client();
  const auto program = xla.compile(update());
  EXPECT_THAT(program.compiled().outputs(), ElementsAre(ArrayType{at::kFloat, {2, 3}}));
  const auto weight = torch::randn({2, 3}), gradient = torch::randn({2, 3});
  auto w = xla.upload(weight, 0);
  const auto g = xla.upload(gradient, 0), lr = xla.upload(torch::tensor(0.5F), 0);
  auto expected = weight.clone();
  for (int step = 0; step < 3; step++) {
    const auto before = w;
    w = program.run({{{w, g, lr}}})[0][0];
    EXPECT_TRUE(before.is_donated());
    expected -= 0.5 * gradient;
  }
  EXPECT_TRUE(at::allclose(w.download(), expected));
  EXPECT_EQ(program.compiled().memory().aliased, 24);
  const auto cost = program.compiled().cost();
  EXPECT_TRUE(cost.empty() || cost.at("flops") == 12);
}

TEST_P(OnPlugin, WrongArgumentsStartNothing) {
  const auto xla = client(2);
  const auto program = xla.compile(update());
  const auto w = xla.upload(torch::ones({2, 3}), 0), lr = xla.upload(torch::tensor(1.0F), 0);
  const auto run = [&](const std::vector<Buffer>& arguments) { return message_of<UsageError>([&] { program.run({{arguments}}); }); };
  EXPECT_THAT(run({w, lr}), HasSubstr("a program with 3 parameters got 2 arguments"));
  EXPECT_THAT(run({w, w, lr}), HasSubstr("arguments 0 and 1 are the same buffer"));
  EXPECT_THAT(run({w, xla.upload(torch::ones({2, 3}, torch::kInt), 0), lr}), HasSubstr("argument 1 of replica 0 is a tensor<2x3xi32>"));
  EXPECT_THAT(run({w, xla.upload(torch::ones({2, 3}), 1), lr}), HasSubstr("argument 1 of replica 0 is on device 1"));
  EXPECT_THAT(run({w, {}, lr}), HasSubstr("argument 1 of replica 0 is missing"));
  const auto g = xla.upload(torch::ones({2, 3}), 0);
  const auto result = program.run({{{w, g, lr}}})[0][0];
  EXPECT_THAT(run({w, g, lr}), HasSubstr("argument 0 of replica 0 was donated"));
  EXPECT_TRUE(at::equal(result.download(), torch::zeros({2, 3})));
}

Program sum_of_four() {
  return {R"(module { func.func public @main(%x: tensor<2xf32>) -> tensor<2xf32> {
    %s = "stablehlo.all_reduce"(%x) <{replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>}> ({
      ^bb0(%a: tensor<f32>, %b: tensor<f32>): %c = "stablehlo.add"(%a, %b) : (tensor<f32>, tensor<f32>) -> tensor<f32> "stablehlo.return"(%c) : (tensor<f32>) -> ()
    }) : (tensor<2xf32>) -> tensor<2xf32>
    return %s : tensor<2xf32>
  } })",
          {{{at::kFloat, {2}}}}};
}

TEST_P(OnPlugin, ReplicasMeetInCollectives) {
  const auto xla = client(4);
  const auto sum = sum_of_four();
  const auto program = xla.compile(sum, {.replicas = 4});
  std::vector<std::vector<Buffer>> arguments;
  for (int replica = 0; replica < 4; replica++) arguments.push_back({xla.upload(torch::tensor({1.0F, float(replica)}), replica)});
  for (const auto& results : program.run(arguments)) EXPECT_TRUE(at::equal(results[0].download(), torch::tensor({4.0F, 6.0F})));
  EXPECT_THAT(message_of<UsageError>([&] { xla.compile(sum, {.replicas = 5}); }), HasSubstr("5 replicas can't be put on 4 devices"));
}

TEST_P(OnPlugin, BarriersKeepEqualOperationsApart) {
  const Program tied{R"(module { func.func public @main(%x: tensor<64xf32>) -> tensor<64xf32> {
    %a = "stablehlo.tanh"(%x) : (tensor<64xf32>) -> tensor<64xf32>
    %b:2 = "stablehlo.optimization_barrier"(%x, %a) : (tensor<64xf32>, tensor<64xf32>) -> (tensor<64xf32>, tensor<64xf32>)
    %c = "stablehlo.tanh"(%b#0) : (tensor<64xf32>) -> tensor<64xf32>
    %d = "stablehlo.add"(%b#1, %c) : (tensor<64xf32>, tensor<64xf32>) -> tensor<64xf32>
    return %d : tensor<64xf32>
  } })",
                     {{{at::kFloat, {64}}}}};
  EXPECT_EQ(client().compile(tied).compiled().operations().at("tanh"), 2);
}

TEST_P(OnPlugin, ACompilersErrorNamesThePlace) {
  const auto wrong = [&] {
    client().compile({"module { func.func public @main() { %x = \"stablehlo.nonsense\"() : () -> () return } }", {}});
  };
  EXPECT_THAT(message_of<Error>(wrong), HasSubstr("can't compile a program"));
  EXPECT_THAT(message_of<Error>([&] { client().compile(update(), {.overrides = {{"xla_no_such", true}}}); }), HasSubstr("xla_no_such"));
}

TEST_P(OnPlugin, ProgramsAreKeptOnDisk) {
  const testing::Folder folder;
  const ProgramCache cache(folder / "programs");
  const auto xla = client();
  EXPECT_FALSE(cache.compile(xla, update(), {}).was_there);
  const auto again = cache.compile(client(), update(), {});
  EXPECT_TRUE(again.was_there);
  EXPECT_FALSE(cache.compile(xla, update(), {.overrides = {{"xla_cpu_enable_fast_math", true}}}).was_there);
  std::vector<std::filesystem::path> files;
  for (const auto& file : std::filesystem::directory_iterator(folder / "programs")) files.push_back(file);
  ASSERT_EQ(files.size(), 2);
  // Neither the machine code of another program nor damaged code may run.
  std::filesystem::copy_file(files[0], folder / "first");
  std::filesystem::rename(files[1], files[0]);
  std::filesystem::rename(folder / "first", files[1]);
  EXPECT_FALSE(cache.compile(xla, update(), {}).was_there);
  EXPECT_TRUE(cache.compile(xla, update(), {}).was_there);
  for (const auto& file : files) {
    std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
    bytes.seekp(static_cast<std::streamoff>(std::filesystem::file_size(file) / 2));
    bytes.put('?');
  }
  EXPECT_FALSE(cache.compile(xla, update(), {}).was_there);
  for (const auto& file : files) std::filesystem::resize_file(file, 20);
  EXPECT_FALSE(cache.compile(xla, update(), {}).was_there);
}

TEST_P(OnPlugin, SeveralProcessesMayKeepOneProgramAtOnce) {
  const testing::Folder folder;
  const ProgramCache cache(folder / "programs");
  const auto xla = client();
  cache.compile(xla, update(), {});
  const auto file = std::filesystem::directory_iterator(folder / "programs")->path();
  std::filesystem::remove(file);
  const testing::Warnings warnings;
  const NewFile of_another(file);
  EXPECT_FALSE(cache.compile(xla, update(), {}).was_there);
  EXPECT_TRUE(cache.compile(xla, update(), {}).was_there);
  EXPECT_THAT(warnings.texts, IsEmpty());
}

TEST(Plugins, SayWhatIsWrong) {
  EXPECT_THAT(message_of<ConfigError>([] { Plugin::load("no/such.so"); }), HasSubstr("there is no PJRT plugin no/such.so"));
  EXPECT_THAT(message_of<ConfigError>([] { Plugin::load("abacus"); }),
              HasSubstr("no PJRT plugin is named 'abacus': name cpu, tpu or cuda"));
  EXPECT_THAT(message_of<ConfigError>([] { Plugin::load("/proc/self/exe"); }), HasSubstr("can't be loaded"));
}

TEST(Plugins, ThatNobodyCanUseAreRefused) {
  const auto fake = [](const std::string& kind) { return TESSERA_TEST_FAKE_PLUGINS + kind + ".so"; };
  EXPECT_THAT(message_of<ConfigError>([&] { Plugin::load(fake("OtherVersion")); }),
              HasSubstr("has version 7.0 of the interface; this program knows 0.x"));
  EXPECT_THAT(message_of<ConfigError>([&] { Plugin::load(fake("TooShort")); }), HasSubstr("its table of functions is too short"));
  EXPECT_THAT(message_of<Error>([&] { Client(Plugin::load(fake("Old"))); }),
              HasSubstr("can't start its devices: this plugin is too old to have the function"));
  EXPECT_THAT(message_of<Error>([&] { Plugin::load(fake("Old")).attributes(); }), HasSubstr("fake_plugin_Old.so: can't describe itself"));
}

TEST_P(OnPlugin, MoreDevicesThanThereAreAreRefused) {
  const auto two = [&] { return Client(Plugin::load(GetParam()), {.devices = 4, .plugin_options = {{"cpu_device_count", int64_t{2}}}}); };
  EXPECT_THAT(message_of<ConfigError>(two), HasSubstr("4 devices are asked for"));
  EXPECT_THAT(message_of<UsageError>([&] { client(0); }), HasSubstr("0 devices"));
  EXPECT_THAT(message_of<UsageError>([&] { client(100'000'000); }),
              HasSubstr("100000000 devices are asked for, and no client has more than 1024"));
}

TEST_P(OnPlugin, AnUnknownOptionIsNamed) {
  const auto plugin = Plugin::load(GetParam());
  if (plugin.version() == "0.81") GTEST_SKIP() << "this plugin takes unknown options without an error";
  EXPECT_THAT(message_of<Error>([&] {
                Client(plugin, {.plugin_options = {{"no_such_option", int64_t{1}}}});
              }),
              HasSubstr("no_such_option"));
}

TEST_P(OnPlugin, ATopologyCompilesWithoutARun) {
  const Topology four(Plugin::load(GetParam()), "cpu:4");
  EXPECT_EQ(four.devices().size(), 4U);
  const auto compiled = four.compile(sum_of_four(), {.replicas = 4});
  EXPECT_EQ(compiled.memory().arguments, 8);
  EXPECT_EQ(compiled.operations().at("all-reduce"), 1);
  const auto other = [&](const std::string& name) { return message_of<Error>([&] { Topology(Plugin::load(GetParam()), name); }); };
  EXPECT_THAT(other("v5p:2x2x1"), HasSubstr("can't make the topology 'v5p:2x2x1'"));
  EXPECT_THAT(other("cpu:many"), HasSubstr("has no number of devices: write cpu:8"));
  EXPECT_THAT(other("cpu:4,fast"), HasSubstr("'fast' is not an option"));
}

TEST(Options, AreReadFromText) {
  const auto options = parse_options("wrap=1,1,1,chip_config_name=megacore,num_slices=2,fast=true");
  EXPECT_EQ(std::get<std::vector<int64_t>>(options.at("wrap")), (std::vector<int64_t>{1, 1, 1}));
  EXPECT_EQ(std::get<std::string>(options.at("chip_config_name")), "megacore");
  EXPECT_EQ(std::get<int64_t>(options.at("num_slices")), 2);
  EXPECT_TRUE(std::get<bool>(options.at("fast")));
  EXPECT_THAT(message_of<ConfigError>([] { parse_options("wrap"); }), HasSubstr("'wrap' is not an option"));
  EXPECT_THAT(message_of<ConfigError>([] { parse_options("a=b,1"); }), HasSubstr("'1' follows the option a"));
}

TEST(Options, OfTheCompilerAreAMessage) {
  // The bytes that a protobuf library writes for four replicas.
  EXPECT_EQ(serialized({.replicas = 4}),
            std::string("\x1a\x1d\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x20\x04\x28\x01\x4a\x0c\x08\x04\x10\x01\x1a"
                        "\x06\x0a\x04\x00\x01\x02\x03",
                        31));
  const auto message = serialized({.overrides = {{"name", int64_t{300}}}});
  WireReader reader(message);
  ASSERT_TRUE(reader.next() && reader.next());
  EXPECT_EQ(reader.field(), 7);
  EXPECT_EQ(reader.bytes(), std::string("\x0a\x04name\x12\x03\x18\xac\x02", 11));
}

TEST(Wire, ACutMessageJustEnds) {
  const auto whole = WireWriter().number(1, 5).bytes(2, "text").text();
  for (size_t size = 0; size < whole.size(); size++) {
    WireReader reader(std::string_view(whole).substr(0, size));
    while (reader.next()) EXPECT_LE(reader.bytes().size(), 4U);
  }
}

// --- Devices that are not here ---

TEST(Topology, TellsByItsNameWhichPluginKnowsIt) {
  for (const auto& [name, plugin] : {std::pair("v5p:4x4x8,wrap=1,1,1", "tpu"),
                                     {"tpu7x:4x4x8", "tpu"},
                                     {"h100:1x16x8", "cuda"},
                                     {"b200:1x1x8,a=b", "cuda"},
                                     {"cpu:8", "cpu"},
                                     {"v5p", ""},
                                     {"vest:1", ""},
                                     {"", ""}}) {
    EXPECT_EQ(Topology::plugin_for(name), plugin) << name;
  }
}

TEST(Topology, OfGpusHasSlicesHostsAndDevices) {
  const auto gpus = gpu_topology("h100:1x16x8");
  ASSERT_TRUE(gpus);
  EXPECT_EQ(std::get<std::string>(gpus->options.at("topology")), "1x16x8");
  EXPECT_THAT(std::get<std::string>(gpus->options.at("target_config")), HasSubstr("cuda_compute_capability { major: 9 }"));
  for (const auto* wrong :
       {"h100", "h100:", "h100:0x2x8", "h100:16", "h100:16x8", "h100:1x16x", "h100:x16x8", "h100:1xx8", "h100:1x2x3x4", "h100:axbxc"}) {
    EXPECT_THAT(message_of<ConfigError>([&] { gpu_topology(wrong); }), HasSubstr("write h100:1x2x8")) << wrong;
  }
}

}  // namespace
}  // namespace tessera::pjrt
