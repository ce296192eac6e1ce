// A process learns its rank, and where the ranks meet, from the variables of torchrun, mpirun and srun.
#include "tessera/base/launcher.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>

#include "tessera/base/error.h"

namespace tessera::launcher_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

const Variables kOpenMpi = {
    {"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
const Variables kSrun = {{"SLURM_PROCID", "5"},       {"SLURM_STEP_NUM_TASKS", "8"}, {"SLURM_LOCALID", "1"},
                         {"SLURM_JOB_ID", "1234567"}, {"SLURM_STEP_ID", "0"},        {"SLURM_STEP_NODELIST", "n[07-09,12]"}};

/// The environment has these variables, and no others of launchers, as long as it exists.
class Environment {
 public:
  explicit Environment(Variables variables, const Variables& more = {}) {
    for (const auto name : launcher_variables()) names_.emplace_back(name);
    for (const auto* name : {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "PMIX_NAMESPACE", "MASTER_ADDR", "MASTER_PORT",
                             "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES"}) {
      names_.emplace_back(name);
    }
    clear();
    for (const auto& [name, value] : more) variables[name] = value;
    for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
  }
  Environment(const Environment&) = delete;
  ~Environment() { clear(); }

 private:
  void clear() const {
    for (const auto& name : names_) ::unsetenv(name.c_str());
  }

  std::vector<std::string> names_;
};

std::string trouble(const Variables& variables, const Variables& more = {}) {
  const Environment environment(variables, more);
  try {
    identity_from_environment();
    return "none";
  } catch (const ConfigError& error) {
    return error.what();
  }
}

void expect_identity(int rank, int size) {
  const auto identity = identity_from_environment();
  ASSERT_TRUE(identity.has_value());
  EXPECT_EQ(identity->rank, rank);
  EXPECT_EQ(identity->world_size, size);
}

TEST(Launcher, IsUnknownWithoutVariables) {
  const Environment environment({});
  EXPECT_FALSE(identity_from_environment());
  EXPECT_FALSE(local_rank_from_environment());
  EXPECT_EQ(meeting_point().host, "127.0.0.1");
}

TEST(Launcher, IsUnderstoodWhicheverItIs) {
  {
    const Environment environment(
        {{"RANK", "2"}, {"WORLD_SIZE", "3"}, {"LOCAL_RANK", "0"}, {"MASTER_ADDR", "head"}, {"MASTER_PORT", "77"}});
    expect_identity(2, 3);
    EXPECT_EQ(local_rank_from_environment(), 0);
    EXPECT_EQ(meeting_point().host, "head");
    EXPECT_EQ(meeting_point().port, 77);
    EXPECT_FALSE(meeting_point().one_host);
  }
  {
    const Environment environment(kOpenMpi);
    expect_identity(1, 4);
    EXPECT_EQ(local_rank_from_environment(), 1);
  }
  {
    const Environment environment({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "2"}});
    expect_identity(0, 2);
    EXPECT_TRUE(meeting_point().one_host);
  }
  {
    const Environment environment(kSrun);
    expect_identity(5, 8);
    EXPECT_EQ(local_rank_from_environment(), 1);
    EXPECT_EQ(meeting_point().host, "n07");
    EXPECT_EQ(meeting_point().port, 20000 + 1234567 % 10000);
  }
  {
    const Environment environment(kSrun, {{"SLURM_STEP_NUM_NODES", "1"}, {"MASTER_PORT", "5000"}});
    EXPECT_EQ(meeting_point().host, "127.0.0.1");
    EXPECT_EQ(meeting_point().port, 5000);
  }
}

// Ranks of one host meet at loopback, which other hosts can't reach, even if MASTER_ADDR is set.
TEST(Launcher, KnowsWhenAllRanksAreHere) {
  const Environment environment(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}, {"MASTER_ADDR", "head"}});
  EXPECT_TRUE(meeting_point().one_host);
  EXPECT_EQ(meeting_point().host, "127.0.0.1");
}

TEST(Launcher, OfABatchScriptStartsNoRanks) {
  const Environment environment({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "16"}, {"SLURM_JOB_ID", "7"}});
  EXPECT_FALSE(identity_from_environment());
}

TEST(Launcher, MayBeStartedByAnother) {
  {
    const Environment environment(kSrun, {{"RANK", "9"}, {"WORLD_SIZE", "16"}, {"TORCHELASTIC_RUN_ID", "none"}});
    expect_identity(9, 16);
  }
  {
    Variables both = kOpenMpi;
    both.insert(kSrun.begin(), kSrun.end());  // mpirun uses srun to reach the hosts
    both.insert({{"SLURM_STEP_NUM_NODES", "1"}, {"MASTER_ADDR", "head"}});
    const Environment environment(both);
    expect_identity(1, 4);
    EXPECT_EQ(meeting_point().host, "head");  // SLURM_STEP_NUM_NODES is that of mpirun's own srun, not of the job
  }
  {
    const Environment environment(kSrun, {{"RANK", "5"}, {"WORLD_SIZE", "8"}});
    expect_identity(5, 8);
  }
}

TEST(Launcher, MustNotContradictAnother) {
  EXPECT_THAT(
      trouble(kOpenMpi, {{"RANK", "0"}, {"WORLD_SIZE", "1"}}),
      AllOf(HasSubstr("RANK=0 of WORLD_SIZE=1"), HasSubstr("OMPI_COMM_WORLD_RANK=1 of OMPI_COMM_WORLD_SIZE=4"), HasSubstr("unset")));
  EXPECT_THAT(trouble(kSrun, {{"RANK", "0"}, {"WORLD_SIZE", "8"}}),
              AllOf(HasSubstr("RANK=0 of WORLD_SIZE=8"), HasSubstr("SLURM_PROCID=5 of SLURM_STEP_NUM_TASKS=8")));
  EXPECT_THAT(trouble({{"RANK", "1"}}), HasSubstr("RANK is set but WORLD_SIZE is not"));
  EXPECT_THAT(trouble({{"RANK", "2"}, {"WORLD_SIZE", "2"}}), HasSubstr("RANK=2 does not exist in a world of WORLD_SIZE=2"));
}

TEST(Launcher, MustNotBeTwoOfMpi) {
  EXPECT_THAT(trouble(kOpenMpi, {{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}),
              AllOf(HasSubstr("OMPI_COMM_WORLD_RANK=1 of OMPI_COMM_WORLD_SIZE=4"), HasSubstr("PMI_RANK=0 of PMI_SIZE=2")));
  const Environment environment(kOpenMpi, {{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}});
  expect_identity(1, 4);
}

TEST(Launcher, OfSlurmMaySpeakPmiToo) {
  const Environment environment(kSrun, {{"PMI_RANK", "5"}, {"PMI_SIZE", "8"}});
  expect_identity(5, 8);
  EXPECT_EQ(local_rank_from_environment(), 1);
  EXPECT_EQ(meeting_point().host, "n07");
}

TEST(Launcher, KeepsJobsOfOneHostApart) {
  const auto point_of = [](const char* job, const Variables& more) {
    Variables variables = more;
    variables["PMIX_NAMESPACE"] = job;
    const Environment environment(kOpenMpi, variables);
    return meeting_point();
  };
  const auto one = point_of("4711.0", {}), other = point_of("4712.0", {});
  EXPECT_NE(one.port, other.port);
  EXPECT_NE(one.job, other.job);
  EXPECT_EQ(point_of("4711.0", {}).port, one.port);
  EXPECT_EQ(point_of("4711.0", {{"MASTER_PORT", "77"}}).port, 77);
}

TEST(Launcher, OfPmixNeedsToBeToldHowManyThereAre) {
  {
    const Environment environment(Variables{{"PMIX_RANK", "1"}, {"WORLD_SIZE", "3"}});
    expect_identity(1, 3);
  }
  {
    const Environment environment(kOpenMpi, {{"PMIX_RANK", "1"}});
    expect_identity(1, 4);
  }
  EXPECT_THAT(trouble({{"PMIX_RANK", "1"}}), AllOf(HasSubstr("PMIX_RANK=1"), HasSubstr("set WORLD_SIZE")));
}

TEST(Launcher, CountsAttempts) {
  {
    const Environment environment({});
    EXPECT_EQ(restart_count(), 0);
  }
  const Environment environment(Variables{{"TORCHELASTIC_RESTART_COUNT", "2"}});
  EXPECT_EQ(restart_count(), 2);
}

TEST(Launcher, NamesTheFirstHostOfAList) {
  EXPECT_EQ(first_host("login"), "login");
  EXPECT_EQ(first_host("a,b"), "a");
  EXPECT_EQ(first_host("n[07-09,12],login"), "n07");
  EXPECT_EQ(first_host("rack[2,4]n[1-3]-ib"), "rack2n1-ib");
  EXPECT_THROW(first_host(""), ConfigError);
  EXPECT_THROW(first_host("n[1-2"), ConfigError);
  EXPECT_THROW(first_host("n[]"), ConfigError);
}

}  // namespace
}  // namespace tessera::launcher_test
