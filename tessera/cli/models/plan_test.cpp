// Plans: their order, table and chart, the errors of the command, machines, and a small model from its config.json.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/simulate/machine.h"
#include "tests/testing/folder.h"
#include "tests/testing/launched.h"

namespace tessera::testing::cli_plan_test {
namespace {

using simulate::Machine;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

std::string tessera() {
  return std::filesystem::path(this_program()).parent_path().parent_path() / "bin/tessera";
}

struct PlanCommand : ::testing::Test {
  const Folder folder;

  Launched::Ended plan(Command flags) const {
    flags.insert(flags.begin(), {"env", "LC_ALL=C", tessera(), "plan"});
    return Launched(flags).end();
  }
  /// A program whose dry run needs 96 GB divided among its ranks, a quarter of it for parameters.
  std::string program() const {
    const auto path = folder / "program";
    write_file(path, R"(#!/bin/sh
peak=$((96000000000 / ${TESSERA_DRY_RUN%%/*}))
cat >"$TESSERA_DRY_RUN_OUT" <<END
{"steps": 3, "parameters": 6000000000, "memory": {"peak": $peak, "where": "backward of a",
  "kinds": {"parameters": $((peak / 4)), "activations": $((peak * 3 / 4))}},
 "traffic": {"gathered": 1, "reduced": 1, "across": 0}, "time": {"step": 1, "compute": 1, "communication": 0, "exposed": 0, "optimizer": 0}}
END
)");
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
    return path;
  }
  std::string model(const std::string& type) const {
    std::filesystem::create_directories(folder / type);
    write_file(folder / type / "config.json", R"({"model_type": ")" + type + R"(",
      "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
      "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 128, "rms_norm_eps": 1e-5})");
    return folder / type;
  }
};

TEST_F(PlanCommand, SortsAndDrawsPlans) {
  const auto fits = plan({"-n", "4", "-n", "8", "-n", "16", "--memory", "20GB", "--", program(), "--layers", "3"});
  EXPECT_EQ(fits.status, 0) << fits.err;
  EXPECT_THAT(fits.out, AllOf(ContainsRegex("as it is +16 +6 GB +yes.*\nas it is +8 +12 GB +yes.*\nas it is +4 +24 GB +no"),
                              HasSubstr("backward of a"), ContainsRegex("as it is +16 +6 GB +###\\.+\n"),
                              ContainsRegex("as it is +4 +24 GB +###########\\.+\n"), HasSubstr("Take 16 ranks"),
                              HasSubstr("tessera launch -n 8 --nnodes 2 --node-rank 0 --rdzv-endpoint"), HasSubstr("--layers 3")));
  const auto chart = fits.out.substr(fits.out.rfind("backward of a"), fits.out.find("Take") - fits.out.rfind("backward of a"));
  for (const auto& line : lines(chart)) EXPECT_LE(std::ssize(line), 80) << line;
}

TEST_F(PlanCommand, SaysWhatTheLeastIsIfNothingFits) {
  const auto none = plan({"-n", "2", "-n", "4", "--memory", "5GB", program()});
  EXPECT_EQ(none.status, 3);
  EXPECT_THAT(none.out, HasSubstr("Nothing fits into 5 GB of a rank; the least is 24 GB, as it is on 4 ranks"));
  const auto json = plan({"-n", "2", "-n", "2", "--memory", "5MB", "--json", program()});
  EXPECT_EQ(json.status, 3);
  EXPECT_EQ(nlohmann::json::parse(json.out).at("plans").size(), 1U);
  EXPECT_THAT(nlohmann::json::parse(json.out).at("verdict").get<std::string>(), HasSubstr("More ranks"));
}

TEST_F(PlanCommand, NamesTheWayOut) {
  const auto says = [&](const Command& flags, const std::string& what) {
    const auto ended = plan(flags);
    EXPECT_NE(ended.status, 0);
    EXPECT_THAT(ended.err, HasSubstr(what));
  };
  says({"-n", "2", "--", "sh", "-c", "echo hello"},
       "the program on 2 ranks ended with status 0 and has taken no step of training with Tessera, for which it has to call "
       "tessera::init or make a Trainer; last it said: hello");
  says({"-n", "2", "--", "sh", "-c", "seq 100; exit 4"}, "last it said: 91\n92");
  says({"-n", "2", "nowhere.gguf"}, "nowhere.gguf is not there");
  says({"-n", "2", model("gpt2")}, "tessera plan -n 8 -- PROGRAM");
  says({"-n", "2", "nothere"}, "nothere is not a model, which is a folder, or a .json, .safetensors or .gguf file; and as a program");
  says({"-n", "2", model("llama") + "/config.json", "extra"}, "is a model, so 'extra' belongs to no flag");
  says({"-n", "2", "--memory", "80", model("llama")}, "--memory: '80' is less than a megabyte; write the unit, such as 80GB");
  says({"-n", "2", "--machine", "tpu", model("llama")}, "there is no machine tpu: give cpu, gpu, or the file of");
  write_file(folder / "cut.json", "{\"kind\": ");
  says({"-n", "2", "--machine", folder / "cut.json", model("llama")}, "cut.json is damaged or not the file of a machine");
  const auto with = [&](const std::string& name, const std::string& sizes) {
    std::filesystem::create_directories(folder / name);
    write_file(folder / name / "config.json", R"({"model_type": "llama", "vocab_size": 512, "num_hidden_layers": 1,
      "intermediate_size": 128, )" + sizes + R"("num_attention_heads": 4})");
    return folder / name;
  };
  says({"-n", "2", with("no-size", "")}, "hidden_size: missing: a plan needs it");
  says({"-n", "2", with("huge", R"("hidden_size": 1000000000000000000, )")}, "at most 268435456");
  write_file(with("damaged", R"("hidden_size": 64, )") / "model.safetensors", "cut off");
  says({"-n", "2", folder / "damaged"}, "model.safetensors");
  says({"-n", "12", model("llama")}, "give a multiple of 8, or --ranks-per-host");
  says({"-n", "2", "--batch-size", "8", program()}, "--batch-size is for a model from its description");
  says({"-n", "2", "--rank", "4", model("llama")}, "--rank is for adapters");
  says({"-n", "2", "--length", "4096", model("llama")}, "at most 128 tokens");
  write_file(folder / "machine.json", R"({"kind": "cpu", "ranks_per_host": 2, "product_1_float32": 0})");
  says({"-n", "2", "--machine", folder / "machine.json", program()},
       "machine.json: product_1_float32 is 0, but must be a number, 1 or more; measure");
}

TEST_F(PlanCommand, GivesPrecisionAndNoRecordToAProgram) {
  const Command bf16 = {tessera(), "plan", "-n", "2", "--precision", "bf16"};
  auto planned = bf16, says = bf16;
  planned.push_back(program());
  EXPECT_THAT(Launched(planned).end().out, AllOf(HasSubstr("Take 2 ranks"), HasSubstr("--mixed-precision bf16")));
  for (const auto* word : {"--", "sh", "-c", "echo $ACCELERATE_MIXED_PRECISION ${TESSERA_RECORD-none}"}) says.emplace_back(word);
  EXPECT_THAT(Launched(says, {{"TESSERA_RECORD", folder / "record"}}).end().err, HasSubstr("last it said: bf16 none"));
}

TEST_F(PlanCommand, LeavesNothingBehind) {
  const auto ended = plan({"-n", "2", "--", "sh", "-c", "sleep 100 & echo left $!"});
  const auto at = ended.err.find("left ");
  ASSERT_NE(at, std::string::npos) << ended.err;
  EXPECT_TRUE(ends(numbers_in(ended.err.substr(at + 5)).at(0)));
}

TEST_F(PlanCommand, RanksShareTheMemoryOfTheirHost) {
  const auto available = [&](const Command& more) {
    Command flags = {"-n", "4", "--json"};
    flags.insert(flags.end(), more.begin(), more.end());
    flags.push_back(program());
    return nlohmann::json::parse(plan(flags).out).at("plans").at(0).at("available").get<double>();
  };
  EXPECT_EQ(available({}), 8 * 64e9 / 4);
  EXPECT_THAT(plan({"-n", "2", program()}).out, HasSubstr("machine cpu: up to 8 ranks on a host, which share 512 GB equally"));
  EXPECT_EQ(available({"--ranks-per-host", "2"}), 8 * 64e9 / 2);
  EXPECT_EQ(available({"--machine", "gpu", "--ranks-per-host", "2"}), 80e9);
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
  EXPECT_NEAR(kind("FULL_SHARD", "optimizer"), 2 * 4 * parameters / 2, 16'384);  // two moments of a half of the values
  EXPECT_NEAR(kind("NO_SHARD", "optimizer"), 2 * 4 * parameters, 16'384);
  EXPECT_LT(kind("FULL_SHARD+ac", "activations"), kind("FULL_SHARD", "activations"));
  EXPECT_THAT(found.at("command").get<std::string>(), AllOf(HasSubstr("tessera launch -n 2"), HasSubstr("--config " + model("llama"))));
  EXPECT_THAT(found.at("verdict").get<std::string>(), HasSubstr("tokenizer.json, which is not there yet"));
}

TEST(Machine, IsReadAsItWasWritten) {
  const Folder folder;
  const auto gpu = Machine::named("gpu");
  gpu.write(folder / "machine.json");
  const auto read = Machine::named(folder / "machine.json");
  EXPECT_EQ(read.kind, "gpu");
  EXPECT_EQ(read.outer.bandwidth, gpu.outer.bandwidth);
  EXPECT_EQ(read.product_seconds(1e12, 100, at::kBFloat16), gpu.product_seconds(1e12, 100, at::kBFloat16));
  EXPECT_GT(read.product_seconds(1e12, 8, at::kFloat), read.product_seconds(1e12, 4096, at::kFloat));
}

TEST(Machine, IsNotMeasuredForAFileThatCantBeWritten) {
  const Folder folder;
  const auto says = [&](const std::string& file) { return Launched({tessera(), "test", "--calibrate", file}).end().err; };
  EXPECT_THAT(says(folder / "nothing/machine.json"), HasSubstr("nothing/machine.json"));
  EXPECT_THAT(says(folder.path()), HasSubstr("is a folder; name a file in it"));
}

TEST(Machine, IsMeasured) {
  const Folder folder;
  const auto ended = Launched({tessera(), "test", "--calibrate", folder / "machine.json"}).end();
  ASSERT_EQ(ended.status, 0) << ended.out << ended.err;
  EXPECT_THAT(ended.out, AllOf(HasSubstr("step of AdamW"), HasSubstr("wrote the medians")));
  const auto read = Machine::named(folder / "machine.json");
  EXPECT_EQ(read.ranks_per_host, 2);
  EXPECT_GT(read.memory, 1e8);
}

}  // namespace
}  // namespace tessera::testing::cli_plan_test
