// Plans: their order, tables and charts, the errors of the command, machines, and a small model from its config.json.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/cli/models/plan_report.h"
#include "tessera/simulate/machine.h"
#include "tests/testing/folder.h"
#include "tests/testing/launched.h"

namespace tessera::testing::cli_plan_test {
namespace {

using cli::ChartStyle, cli::Plan;
using simulate::Machine;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

Plan plan_named(const std::string& name, double gigabytes, double seconds, int world = 8) {
  return {.name = name,
          .world = world,
          .ranks_per_host = 8,
          .settings = {{"fsdp_sharding_strategy", "FULL_SHARD"}},
          .tokens = 1000,
          .memory = 10e9,
          .outcome = {{"memory", {{"peak", gigabytes * 1e9}, {"where", "backward of layers.3"}, {"kinds", {{"parameters", gigabytes * 1e9 / 4}, {"activations", gigabytes * 1e9 * 3 / 4}}}}},
                      {"traffic", {{"gathered", 1e9}, {"reduced", 1e9}, {"across", 0}}},
                      {"time", {{"step", seconds}, {"compute", seconds / 2}, {"communication", seconds}, {"exposed", seconds / 2}, {"optimizer", 0}}}}};
}

TEST(PlanReport, HasThoseThatFitFirst) {
  std::vector<Plan> plans = {plan_named("large", 20, 1), plan_named("slow", 5, 3), plan_named("fast", 6, 2), plan_named("many", 6, 2, 16)};
  cli::sort_plans(plans);
  std::vector<std::string> names;
  for (const auto& plan : plans) names.push_back(plan.name);
  EXPECT_THAT(names, ElementsAre("many", "fast", "slow", "large"));
  EXPECT_THAT(cli::plan_tables(plans), AllOf(HasSubstr("backward of layers.3"), HasSubstr("20 GB    no"), HasSubstr("activations")));
}

TEST(PlanReport, DrawsBarsInTheColumnsThereAre) {
  const std::vector<Plan> plans = {plan_named("one", 8, 1), plan_named("another", 4, 1)};
  for (const int columns : {40, 80, 200}) {
    for (const auto& line : lines(cli::plan_chart(plans, {.columns = columns}))) EXPECT_LE(std::ssize(line), columns) << line;
  }
  EXPECT_THAT(cli::plan_chart(plans, {.columns = 20}), IsEmpty());
  EXPECT_THAT(cli::plan_chart(plans, {.columns = 80, .glyphs = train::Glyphs::Blocks}), AllOf(HasSubstr("█▓▓"), Not(HasSubstr("\033"))));
  EXPECT_THAT(cli::plan_chart(plans, {.columns = 80, .colours = ChartStyle::Colours::Yes}), HasSubstr("\033[34m"));
}

TEST(PlanReport, WritesTheCommandForEachHost) {
  EXPECT_EQ(cli::launch_line(plan_named("a", 1, 1), "./train"), "tessera launch -n 8 \\\n    --fsdp-sharding-strategy FULL_SHARD \\\n    ./train");
  EXPECT_THAT(cli::launch_line(plan_named("a", 1, 1, 16), "./train"), HasSubstr("-n 8 --nnodes 2 --node-rank 0 --rdzv-endpoint"));
}

struct PlanCommand : ::testing::Test {
  const Folder folder;

  Launched::Ended plan(Command flags) const {
    flags.insert(flags.begin(), {std::filesystem::path(this_program()).parent_path().parent_path() / "bin/tessera", "plan"});
    return Launched(flags).end();
  }
  /// A program whose dry run needs 96 GB divided among its ranks.
  std::string program() const {
    const auto path = folder / "program";
    write_file(path, R"(#!/bin/sh
cat >"$TESSERA_DRY_RUN_OUT" <<END
{"steps": 3, "parameters": 6000000000, "memory": {"peak": $((96000000000 / ${TESSERA_DRY_RUN%%/*})), "where": "backward of a", "kinds": {"parameters": 1}},
 "traffic": {"gathered": 1, "reduced": 1, "across": 0}, "time": {"step": 1, "compute": 1, "communication": 0, "exposed": 0, "optimizer": 0}}
END
)");
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
    return path;
  }
  std::string model(const std::string& type) const {
    std::filesystem::create_directories(folder / type);
    write_file(folder / type / "config.json", R"({"model_type": ")" + type + R"(", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
      "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 128, "rms_norm_eps": 1e-5})");
    return folder / type;
  }
};

TEST_F(PlanCommand, SaysOnHowManyRanksAProgramFits) {
  const auto fits = plan({"-n", "8", "-n", "16", "--memory", "20GB", "--", program(), "--layers", "3"});
  EXPECT_EQ(fits.status, 0) << fits.err;
  EXPECT_THAT(fits.out, AllOf(HasSubstr("Take 16 ranks"), HasSubstr("tessera launch -n 8 --nnodes 2"), HasSubstr("--layers 3")));
  const auto none = plan({"-n", "2", "--memory", "5GB", program()});
  EXPECT_EQ(none.status, 3);
  EXPECT_THAT(none.err, AllOf(HasSubstr("nothing fits into 5.0 GB"), HasSubstr("It fits on 24 ranks or more")));
  const auto never = plan({"-n", "2", "--memory", "5MB", "--json", program()});
  EXPECT_EQ(never.status, 3);
  EXPECT_THAT(nlohmann::json::parse(never.out).at("verdict").get<std::string>(), HasSubstr("More ranks do not help, up to 4096"));
}

TEST_F(PlanCommand, NamesTheWayOut) {
  const auto says = [&](const Command& flags, const std::string& what) {
    const auto ended = plan(flags);
    EXPECT_NE(ended.status, 0);
    EXPECT_THAT(ended.err, HasSubstr(what));
  };
  says({"-n", "2", "--", "sh", "-c", "echo hello"}, "has taken no step of training with Tessera: hello");
  says({"-n", "2", "nowhere.gguf"}, "nowhere.gguf is not there");
  says({"-n", "2", model("gpt2")}, "tessera plan -n 8 -- PROGRAM");
  says({"-n", "12", "--strategy", "HYBRID_SHARD", program()}, "give -n 16");
  says({"-n", "2", "--device", "xla", program()}, "tessera xla compile --topology");
  says({"-n", "2", "--length", "4096", model("llama")}, "at most 128 tokens");
  write_file(folder / "machine.json", R"({"kind": "cpu", "products": [{"side": 16, "float32": 0}]})");
  says({"-n", "2", "--machine", folder / "machine.json", program()}, "machine.json: products[0].float32 is 0, but must be a positive number; measure");
}

TEST_F(PlanCommand, ShardsAModelInEachWay) {
  const auto ended = plan({model("llama"), "-n", "2", "--batch-size", "2", "--json"});
  ASSERT_EQ(ended.status, 0) << ended.err;
  const auto found = nlohmann::json::parse(ended.out);
  std::map<std::string, nlohmann::json> plans;
  for (const auto& each : found.at("plans")) plans[each.at("plan")] = each;
  EXPECT_EQ(plans.size(), 8U) << found.at("left_out");  // four strategies, with and without activation checkpointing
  const auto kind = [&](const char* plan, const char* name) { return plans.at(plan).at("memory").at("kinds").at(name).get<double>(); };
  const auto parameters = plans.at("FULL_SHARD").at("parameters").get<double>();
  EXPECT_NEAR(kind("FULL_SHARD", "optimizer"), 2 * 4 * parameters / 2, 4096);  // two moments of a half of the values
  EXPECT_NEAR(kind("NO_SHARD", "optimizer"), 2 * 4 * parameters, 4096);
  EXPECT_LT(kind("FULL_SHARD+ac", "activations"), kind("FULL_SHARD", "activations"));
  EXPECT_EQ(found.at("command").get<std::string>().find("tessera launch -n 2"), 0U);
}

TEST(Machine, IsReadAsItWasWritten) {
  const Folder folder;
  Machine::gpu().write(folder / "machine.json");
  const auto read = Machine::named(folder / "machine.json");
  EXPECT_EQ(read.kind, "gpu");
  EXPECT_EQ(read.outer.bandwidth, Machine::gpu().outer.bandwidth);
  EXPECT_EQ(read.product_seconds(1e12, 100, at::kBFloat16), Machine::gpu().product_seconds(1e12, 100, at::kBFloat16));
  EXPECT_GT(read.product_seconds(1e12, 8, at::kFloat), read.product_seconds(1e12, 4096, at::kFloat));
}

TEST(Machine, IsMeasured) {
  const Folder folder;
  const auto ended = Launched({std::filesystem::path(this_program()).parent_path().parent_path() / "bin/tessera", "test", "--calibrate", folder / "machine.json"}).end();
  ASSERT_EQ(ended.status, 0) << ended.out << ended.err;
  EXPECT_THAT(ended.out, AllOf(HasSubstr("step of AdamW"), HasSubstr("wrote the medians")));
  const auto read = Machine::named(folder / "machine.json");
  EXPECT_EQ(read.ranks_per_host, 2);
  EXPECT_GT(read.memory, 1e8);
}

}  // namespace
}  // namespace tessera::testing::cli_plan_test
