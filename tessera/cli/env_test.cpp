// `tessera env` as programs and people read it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <nlohmann/json.hpp>

#include "tests/testing/folder.h"
#include "tests/testing/launched.h"

namespace tessera::testing::cli_env_test {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

Launched::Ended env_command(Command flags, const Environment& environment = {}) {
  flags.insert(flags.begin(), {std::filesystem::path(this_program()).parent_path().parent_path() / "bin/tessera", "env"});
  return Launched(flags, environment).end();
}

TEST(EnvCommand, DescribesThisMachine) {
  const auto ended = env_command({"--json"});
  ASSERT_EQ(ended.status, 0) << ended.err;
  const auto found = nlohmann::json::parse(ended.out);
  cpu_set_t cores;
  ASSERT_EQ(::sched_getaffinity(0, sizeof cores, &cores), 0);
  EXPECT_EQ(found.at("processors").at("usable"), CPU_COUNT(&cores));
  EXPECT_GT(found.at("memory").at("total").get<int64_t>(), 1 << 20);
  EXPECT_THAT(found.at("libtorch").at("version").get<std::string>(), StartsWith("2."));
  EXPECT_THAT(found.at("libtorch").at("library").get<std::string>(), HasSubstr("libtorch_cpu.so"));
  EXPECT_GT(found.at("libtorch").at("built_with").size(), 3U);
  EXPECT_EQ(found.at("transports").at("threads"), "yes");
  EXPECT_THAT(found.at("system").at("kernel").get<std::string>(), StartsWith("Linux "));
}

TEST(EnvCommand, ShowsVariablesButNoSecrets) {
  const auto ended = env_command({}, {{"TESSERA_LOG", "info"},
                                      {"TESSERA_RESIDENC", "gathered"},
                                      {"TESSERA_SECRET", "sesame"},
                                      {"RANK", "1"},
                                      {"WORLD_SIZE", "2"},
                                      {"OMP_NUM_THREADS", "1\x1b[31m"},
                                      {"HF_HOME", "/x"}});
  EXPECT_EQ(ended.status, 0) << ended.err;
  EXPECT_THAT(ended.out, AllOf(HasSubstr("rank 1 of 2\n"), ContainsRegex("TESSERA_LOG +info\n"), HasSubstr("(Tessera does not read this one)"),
                               HasSubstr("1\\x1b[31m"), Not(HasSubstr("sesame"))));
}

TEST(EnvCommand, SaysWhichLauncherAndTransportItFinds) {
  const auto under = [](const std::map<std::string, std::string>& variables) {
    return nlohmann::json::parse(env_command({"--json"}, variables).out).at("launcher");
  };
  std::map<std::string, std::string> mpi = {{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
  EXPECT_EQ(under(mpi).at("started_by"), "mpirun of Open MPI (OMPI_COMM_WORLD_RANK)");
  EXPECT_THAT(under(mpi).at("transport").get<std::string>(), StartsWith("shm: all ranks are on this host"));
  mpi["OMPI_COMM_WORLD_LOCAL_SIZE"] = "1";
  EXPECT_THAT(under(mpi).at("transport").get<std::string>(), StartsWith("auto: "));
  mpi["TESSERA_TRANSPORT"] = "mpi";
  EXPECT_EQ(under(mpi).at("transport"), "mpi: TESSERA_TRANSPORT names it");
  EXPECT_EQ(under({}).at("transport"), "self: this is a lone process");
}

TEST(EnvCommand, ShowsTheConfigurationThatLaunchWouldRead) {
  const Folder folder;
  const auto file = (folder / "run.yaml").string();
  write_file(file, "mixed_precision: bf16\n");
  const auto found = nlohmann::json::parse(env_command({"--json"}, {{"TESSERA_CONFIG_FILE", file}}).out);
  EXPECT_EQ(found.at("configuration").at("file"), file);
  EXPECT_EQ(found.at("configuration").at("mixed_precision"), "bf16");
  write_file(file, "mixed_precision: bf61\n");
  EXPECT_THAT(env_command({}, {{"TESSERA_CONFIG_FILE", file}}).out, HasSubstr("'bf61' is not one of"));
}

TEST(EnvCommand, GoesOnWhereLaunchersContradictThemselves) {
  const auto ended = env_command({"--json"}, {{"RANK", "5"}, {"WORLD_SIZE", "2"}, {"TESSERA_LOG", "no \xff text"}});
  ASSERT_EQ(ended.status, 0) << ended.err;
  const auto found = nlohmann::json::parse(ended.out);
  EXPECT_THAT(found.at("launcher").at("this_process").get<std::string>(), StartsWith("error: RANK=5"));
  EXPECT_EQ(found.at("launcher").at("WORLD_SIZE"), "2");
  EXPECT_EQ(found.at("environment").at("TESSERA_LOG"), "no \\xff text");
}

}  // namespace
}  // namespace tessera::testing::cli_env_test
