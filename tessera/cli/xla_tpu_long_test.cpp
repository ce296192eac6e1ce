// The compiler for TPUs, where none is.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tessera/testing/folder.h"
#include "tessera/testing/launched.h"
#include "tessera/xla/pjrt/plugin.h"

namespace tessera::testing::cli_xla_tpu_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class Tpu : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const auto& plugin : pjrt::installed_plugins()) {
      if (plugin.name == "tpu") return;
    }
    GTEST_SKIP() << "libtpu is not installed";
  }
  static Launched::Ended xla(Command flags, const Environment& environment = {}) {
    flags.insert(flags.begin(), {std::filesystem::path(this_program()).parent_path().parent_path() / "bin/tessera", "xla"});
    return Launched(flags, environment).end();
  }
  static nlohmann::json found(Command flags) {
    flags.emplace_back("--json");
    const auto ended = xla(flags);
    EXPECT_EQ(ended.err, "");
    return nlohmann::json::parse(ended.out);
  }
};

TEST_F(Tpu, TopologiesHaveDevicesAndTheirMemory) {
  const auto devices = found({"devices", "--topology", "v5p:4x4x8,wrap=1,1,1"}).at("devices");
  ASSERT_EQ(devices.size(), 128U);
  EXPECT_GT(devices[0].at("memory").get<int64_t>(), int64_t{90} << 30);
  EXPECT_EQ(devices[0].at("attributes").at("coords").size(), 3U);
  EXPECT_EQ(found({"devices", "--topology", "v4:4x4x4"}).at("devices").size(), 128U);
  EXPECT_EQ(found({"devices", "--topology", "v4:4x4x4,chip_config_name=megacore"}).at("devices").size(), 64U);
  EXPECT_THAT(xla({"devices", "--topology", "v4:4x4x4"}).out, AllOf(HasSubstr("wrap=1,1,1"), HasSubstr("megacore")));
}

TEST_F(Tpu, WrongTopologiesAreErrors) {
  EXPECT_THAT(xla({"devices", "--topology", "nonsense:2x2x1"}).err, HasSubstr("can't make the topology 'nonsense:2x2x1'"));
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

}  // namespace
}  // namespace tessera::testing::cli_xla_tpu_test
