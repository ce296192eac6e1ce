// The compilers for TPUs and GPUs, on a machine without any.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tessera/xla/pjrt/plugin.h"
#include "tessera/xla/pjrt/topology.h"
#include "tests/testing/folder.h"
#include "tests/testing/launched.h"

namespace tessera::testing::cli_xla_tpu_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string built(const std::string& program) { return std::filesystem::path(this_program()).parent_path().parent_path() / "bin" / program; }

Launched::Ended xla(Command flags, const Environment& environment = {}) {
  flags.insert(flags.begin(), {built("tessera"), "xla"});
  return Launched(flags, environment).end();
}

nlohmann::json found(Command flags) {
  flags.insert(flags.begin() + 1, "--json");
  const auto ended = xla(flags);
  EXPECT_EQ(ended.err, "");
  return nlohmann::json::parse(ended.out);
}

bool is_installed(const std::string& plugin) {
  return std::ranges::any_of(pjrt::installed_plugins(), [&](const auto& installed) { return installed.name == plugin; });
}

class Tpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!is_installed("tpu")) GTEST_SKIP() << "libtpu is not installed";
  }
};

TEST_F(Tpu, TopologiesHaveDevicesAndTheirMemory) {
  const auto devices = found({"devices", "--topology", "v5p:4x4x8,wrap=1,1,1"}).at("devices");
  ASSERT_EQ(devices.size(), 128U);
  EXPECT_GT(devices[0].at("memory").get<int64_t>(), int64_t{90} << 30);
  EXPECT_EQ(devices[0].at("attributes").at("coords").size(), 3U);
  EXPECT_EQ(found({"devices", "--topology", "v4:4x4x4"}).at("devices").size(), 128U);
  EXPECT_EQ(found({"devices", "--topology", "v4:4x4x4,chip_config_name=megacore"}).at("devices").size(), 64U);
  EXPECT_EQ(found({"devices", "--topology", "v4:4x4x4"}).at("notes").size(), 2U);
  EXPECT_THAT(xla({"devices", "--topology", "v4:4x4x4"}).out, AllOf(HasSubstr("wrap=1,1,1"), HasSubstr("megacore")));
}

TEST_F(Tpu, WrongTopologiesAreErrors) {
  EXPECT_THAT(xla({"devices", "--plugin", "tpu", "--topology", "nonsense:2x2x1"}).err, HasSubstr("can't make the topology 'nonsense:2x2x1'"));
  EXPECT_THAT(xla({"devices", "--topology", "v5p:2x2x1,nonsense=1"}).err, HasSubstr("nonsense"));
}

TEST_F(Tpu, NobodyAsksATpuForDevicesOfACpu) {
  const auto ended = xla({"devices", "--plugin", "tpu", "--devices", "4"}, {{"TPU_SKIP_MDS_QUERY", "1"}, {"ALLOW_MULTIPLE_LIBTPU_LOAD", "1"}});
  EXPECT_THAT(ended.err, ::testing::Not(HasSubstr("cpu_device_count")));
  EXPECT_TRUE(ended.status == 0 || ended.err.find("can't start its devices") != std::string::npos) << ended.err;
}

constexpr auto kGatherAndMultiply = R"(module @step { func.func public @main(%w: tensor<512x4096xbf16>, %x: tensor<256x4096xbf16>) -> tensor<256x4096xbf16> {
  %g = "stablehlo.all_gather"(%w) <{all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1, 2, 3, 4, 5, 6, 7]]> : tensor<1x8xi64>}> : (tensor<512x4096xbf16>) -> tensor<4096x4096xbf16>
  %y = "stablehlo.dot_general"(%x, %g) <{dot_dimension_numbers = #stablehlo.dot<lhs_contracting_dimensions = [1], rhs_contracting_dimensions = [0]>}> : (tensor<256x4096xbf16>, tensor<4096x4096xbf16>) -> tensor<256x4096xbf16>
  return %y : tensor<256x4096xbf16>
} })";

TEST_F(Tpu, ProgramsHaveFigures) {
  const Folder folder;
  const auto program = (folder / "step.mlir").string();
  write_file(program, kGatherAndMultiply);
  for (const auto* effort : {"9", "39"}) {
    const auto compiled = found({"compile", program, "--topology", "v5p:2x2x2,wrap=1,1,1", "--effort", effort});
    EXPECT_EQ(compiled.at("replicas"), 8);
    EXPECT_EQ(compiled.at("memory").at("arguments"), 512 * 4096 * 2 + 256 * 4096 * 2);
    EXPECT_GE(compiled.at("memory").at("temporary").get<int64_t>(), 4096 * 4096);
    EXPECT_EQ(compiled.at("fits"), true);
    EXPECT_NEAR(compiled.at("cost").at("flops").get<double>(), 2.0 * 256 * 4096 * 4096, 1e9);
    const auto& operations = compiled.at("operations");
    EXPECT_EQ(operations.value("all-gather", 0) + operations.value("all-gather-start", 0), 1) << operations;
  }
  const auto refused = xla({"compile", program, "--topology", "v5p:1x1x1"});
  EXPECT_EQ(refused.status, 1);
  EXPECT_THAT(refused.err, HasSubstr("tessera: "));
}

TEST_F(Tpu, ABadFlagEndsOnlyTheChild) {
  const Folder folder;
  const auto program = (folder / "step.mlir").string();
  write_file(program, kGatherAndMultiply);
  EXPECT_THAT(xla({"compile", program, "--topology", "v5p:2x2x2"}, {{"XLA_FLAGS", "--xla_no_such"}}).err,
              AllOf(HasSubstr("the plugin has ended its process"), HasSubstr("xla_no_such")));
}

// --- A GPT of 12 layers, fully sharded over eight devices ---

class Pod : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!is_installed(pjrt::Topology::plugin_for(GetParam()))) GTEST_SKIP() << "no compiler for " << GetParam() << " is installed";
  }
  static nlohmann::json step(Command flags) {
    flags.insert(flags.begin(), {"compile", "--topology", GetParam(), "--effort", "9", "--", built("bench_pod"), "gpt-small"});
    return found(flags);
  }
  static double gathered(const nlohmann::json& step) { return step.at("collectives").at("all-gather").at("bytes").get<double>(); }
  static double temporary(const nlohmann::json& step) { return step.at("memory").at("temporary").get<double>(); }
};
INSTANTIATE_TEST_SUITE_P(Topologies, Pod, ::testing::Values("v5p:2x2x2,wrap=1,1,1", "h100:1x1x8"),
                         [](const auto& info) { return info.param.substr(0, info.param.find(':')); });

TEST_P(Pod, BarriersLetBackwardGatherAgain) {
  const auto tied = step({}), free = step({"--no-barriers"});
  EXPECT_GT(gathered(tied), 1.9 * gathered(free));
  EXPECT_LT(temporary(tied), 0.75 * temporary(free));
}

TEST_P(Pod, CheckpointedBlocksKeepTheirInputsAlone) {
  const auto whole = step({}), checkpointed = step({"--checkpointing"});
  EXPECT_NEAR(gathered(checkpointed) / gathered(whole), 1, 0.01);
  EXPECT_LT(temporary(checkpointed), 0.5 * temporary(whole));
  EXPECT_GT(temporary(step({"--checkpointing", "--no-barriers"})), 3 * temporary(checkpointed));
}

TEST_P(Pod, HalfOfTheBytesTravelInBf16) {
  const auto traffic = [](const nlohmann::json& step) {
    double bytes = 0;
    for (const auto& [kind, collective] : step.at("collectives").items()) bytes += collective.at("bytes").get<double>();
    return bytes;
  };
  EXPECT_NEAR(traffic(step({"--checkpointing", "--dtype", "bf16"})) / traffic(step({"--checkpointing"})), 0.5, 0.02);
}

}  // namespace
}  // namespace tessera::testing::cli_xla_tpu_test
