// `tessera xla program` shows the programs of a run that it starts, and those of an earlier run.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "tessera/xla/init.h"
#include "tests/testing/child_task.h"
#include "tests/testing/folder.h"
#include "tests/testing/launched.h"

namespace tessera::testing::cli_xla_program_test {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::StartsWith;

/// A few steps of two replicas, with an operator that runs on the CPU before them.
const ChildTask training("train on xla", [](const std::string& end) {
  const auto world = xla::init({.devices = 2});
  const auto device = world.traits().device;
  (void)torch::histc(torch::ones({2}, device), 4, 0, 1).cpu();
  auto weight = torch::ones({8, 8}, device);
  for (int step = 0; step < 5; step++) {
    auto gradient = weight.mm(weight) * 0.01;
    world.all_reduce(gradient).wait();
    weight.sub_(gradient);
    world.step_done();
  }
  std::puts("trained");
  std::fflush(stdout);
  if (end == "sleep") ::sleep(100);
  return end == "fail" ? 5 : 0;
});

Launched::Ended program(Command flags, const Environment& environment = training.environment()) {
  flags.insert(flags.begin(), {std::filesystem::path(this_program()).parent_path().parent_path() / "bin/tessera", "xla", "program"});
  return Launched(flags, environment).end();
}

nlohmann::json step_of(const nlohmann::json& found) {
  EXPECT_EQ(found.at("processes").size(), 1U);
  for (const auto& each : found.at("processes").at(0).at("programs")) {
    if (each.at("executions") == 4) return each;
  }
  ADD_FAILURE() << "no program has run in all steps but the first: " << found;
  return {};
}

TEST(XlaProgram, SaysWhatARunHasCompiled) {
  const auto ended = program({"--json", this_program()});
  ASSERT_EQ(ended.status, 0) << ended.err;
  EXPECT_THAT(ended.err, HasSubstr("trained"));
  const auto found = nlohmann::json::parse(ended.out);
  const auto& process = found.at("processes").at(0);
  EXPECT_EQ(process.at("platform"), "cpu");
  EXPECT_EQ(process.at("replicas"), 2);
  EXPECT_EQ(process.at("fallbacks").at("aten::histc"), 1);
  const auto step = step_of(found);
  EXPECT_EQ(step.at("memory").at("arguments"), 8 * 8 * 4 + 4);  // the weight and 0.01; the 1 of sub_ is a whole number, which is text until it moves
  EXPECT_EQ(step.at("operations").at("all-reduce"), 1);
  EXPECT_GT(step.at("operators"), 2);
  const auto shown = program({this_program()}).out;
  EXPECT_THAT(shown, ContainsRegex("process +[0-9]+, 2 replicas of cpu\non the CPU aten::histc, 1 time\n"));
  EXPECT_THAT(shown, ContainsRegex("program +[0-9]: [0-9]+ operations, compiled in [0-9.]+ s, run 4 times\nmemory +260 B arguments, .* code\n.*all-reduce +1, 256 B\n"));
}

TEST(XlaProgram, ATextIsWhatCompileTakes) {
  const Folder folder;
  const auto text = program({"--text", this_program()});
  ASSERT_EQ(text.status, 0) << text.err;
  EXPECT_THAT(text.out, AllOf(StartsWith("module @step {"), HasSubstr("stablehlo.dot_general"), HasSubstr("stablehlo.all_reduce")));
  write_file(folder / "step.mlir", text.out);
  const auto tessera = std::filesystem::path(this_program()).parent_path().parent_path() / "bin/tessera";
  const auto compiled = Launched({tessera, "xla", "compile", folder / "step.mlir", "--topology", "cpu:2"}).end();
  EXPECT_THAT(compiled.out, ContainsRegex("replicas +2\nmemory +260 B arguments.*all-reduce +1, 256 B\n"));
}

TEST(XlaProgram, ReadsWhatARunHasLeft) {
  const Folder folder;
  const auto place = (folder / "programs").string();
  const Environment variables = training.environment({}, {{"TESSERA_XLA_PROGRAMS", place}, {"TESSERA_XLA_CACHE", (folder / "cache").string()}});
  ASSERT_EQ(Launched({this_program()}, variables).end().status, 0);
  const auto first = program({"--json", place}, {});
  const auto step = step_of(nlohmann::json::parse(first.out));
  EXPECT_EQ(step.at("from_disk"), false);
  EXPECT_THAT(read_file(step.at("file").get<std::string>()), HasSubstr("stablehlo.all_reduce"));
  EXPECT_THAT(program({place}, {}).out, HasSubstr("text       " + step.at("file").get<std::string>()));
  EXPECT_EQ(program({"--text", "--number", "99", place}, {}).err, "tessera: there is no program 99, only 3 programs\n");
  // A process that ended during a compilation has left only the text.
  write_file(folder / "programs/1_1.mlir", "module {}\n");
  EXPECT_THAT(program({place}, {}).out, HasSubstr("process    1\n\nprogram    1: not compiled to the end\ntext  "));
  EXPECT_EQ(program({"--text", "--number", "1", place}, {}).out, "module {}\n");
  std::filesystem::remove(folder / "programs/1_1.mlir");
  // The next process loads from disk what this one has compiled.
  std::filesystem::remove_all(place);
  ASSERT_EQ(Launched({this_program()}, variables).end().status, 0);
  EXPECT_EQ(step_of(nlohmann::json::parse(program({"--json", place}, {}).out)).at("from_disk"), true);
}

TEST(XlaProgram, EndsARunThatIsLong) {
  const auto ended = program({"--json", "--seconds", "4", this_program()}, training.environment("sleep"));
  EXPECT_EQ(ended.status, 0) << ended.err;
  EXPECT_EQ(nlohmann::json::parse(ended.out).at("processes").size(), 1U);
}

TEST(XlaProgram, NamesWhatIsWrong) {
  EXPECT_EQ(program({this_program()}, training.environment("fail")).status, 5);
  const auto says = [](const Command& flags, int status) {
    const auto ended = program(flags, {});
    EXPECT_EQ(ended.status, status) << ended.err;
    return ended.err;
  };
  const Folder folder;
  EXPECT_THAT(says({folder.path()}, 1), HasSubstr("has no programs; a run leaves them there if TESSERA_XLA_PROGRAMS names it"));
  EXPECT_THAT(says({"true"}, 1), HasSubstr("true has compiled no program for an XLA device; its status is 0"));
  EXPECT_THAT(says({"/no/such/program"}, 1), HasSubstr("can't start '/no/such/program'"));
  EXPECT_THAT(says({folder.path(), "--json"}, 2), HasSubstr("'--json' comes after the folder"));
  EXPECT_THAT(says({}, 2), HasSubstr("xla program needs a FOLDER with programs, or a PROGRAM to run"));
  write_file(folder / "7.json", "no");
  write_file(folder / "7_1.mlir", "module {}");
  EXPECT_THAT(says({folder.path()}, 1), HasSubstr("7.json is not what a run leaves in TESSERA_XLA_PROGRAMS"));
  const auto unwritable = Launched({this_program()}, training.environment({}, {{"TESSERA_XLA_PROGRAMS", (folder / "7.json/in").string()}})).end();
  EXPECT_EQ(unwritable.status, 3);
  EXPECT_THAT(unwritable.err, HasSubstr("7.json/in"));
}

}  // namespace
}  // namespace tessera::testing::cli_xla_program_test
