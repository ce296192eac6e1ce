#include "tessera/base/launcher.h"

#include <fmt/format.h>

#include <array>
#include <limits>

#include "tessera/base/env.h"
#include "tessera/base/error.h"

namespace tessera {
namespace {

constexpr int kDefaultPort = 29500;
constexpr int64_t kMost = std::numeric_limits<int>::max();

struct Launcher {
  std::string_view name;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
};
constexpr Launcher kPlain = {"tessera launch, torchrun, or variables set by hand", "RANK", "WORLD_SIZE", "LOCAL_RANK",
                             "LOCAL_WORLD_SIZE"};
// A PMIx server numbers the ranks, but does not say how many there are.
constexpr Launcher kPmix = {"a PMIx server", "PMIX_RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr std::array kMpi = {
    Launcher{"mpirun of Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
             "OMPI_COMM_WORLD_LOCAL_SIZE"},
    Launcher{"mpirun of MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    Launcher{"mpirun of MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"},
};
// A batch script, too, has SLURM_PROCID and SLURM_NTASKS. Only the tasks that srun starts have SLURM_STEP_NUM_TASKS.
constexpr Launcher kSlurm = {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", nullptr};

std::optional<Identity> identity_by(const Launcher& launcher) {
  const auto rank = env_int(launcher.rank, 0, kMost);
  const auto size = env_int(launcher.size, 1, kMost);
  if (!rank && !size) return std::nullopt;
  if (!rank || !size) {
    throw ConfigError("{} is set but {} is not; set both, or neither for a lone process; tessera launch sets them by itself",
                      rank ? launcher.rank : launcher.size, rank ? launcher.size : launcher.rank);
  }
  if (*rank >= *size) {
    throw ConfigError(
        "{}={} does not exist in a world of {}={}, whose ranks are 0 to {}; unset both, and start the program with tessera launch -n {}",
        launcher.rank, *rank, launcher.size, *size, *size - 1, *size);
  }
  return Identity{.rank = static_cast<int>(*rank), .world_size = static_cast<int>(*size)};
}

std::string describe(const Launcher& launcher, const Identity& identity) {
  return fmt::format("{}={} of {}={}", launcher.rank, identity.rank, launcher.size, identity.world_size);
}

ConfigError contradiction(const Launcher& one, const Launcher& other) {
  return ConfigError("the environment describes this process twice: {}, but {}; unset the variables that do not apply",
                     describe(one, *identity_by(one)), describe(other, *identity_by(other)));
}

bool agree(const Launcher& one, const Launcher& other) {
  return *identity_by(one) == *identity_by(other);
}

/// The launcher that has started this process, if it sets other variables than RANK and WORLD_SIZE. mpirun may itself use srun, so mpirun's
/// variables take precedence.
const Launcher* outer_launcher() {
  const Launcher* found = nullptr;
  for (const auto& launcher : kMpi) {
    if (!env(launcher.size) && !env(launcher.rank)) continue;
    if (found != nullptr && !agree(*found, launcher)) throw contradiction(*found, launcher);
    if (found == nullptr) found = &launcher;
  }
  // srun --mpi=pmi2 sets the variables of PMI in addition to its own, which say more.
  const bool is_srun = env(kSlurm.size) && (found == nullptr || (found == &kMpi[1] && agree(*found, kSlurm)));
  return is_srun ? &kSlurm : found;
}

/// The launcher of RANK and WORLD_SIZE, or of PMIX_RANK and WORLD_SIZE; null if they are not set.
const Launcher* plain_launcher() {
  if (env(kPlain.rank) || !env(kPmix.rank)) return identity_by(kPlain) ? &kPlain : nullptr;
  return env(kPmix.size) ? &kPmix : nullptr;
}

constexpr int kFirstPort = 20000, kPorts = 10000;  // the range of ports for jobs that set no port

/// Hashes the job's name, so that two jobs of a host rarely get the same port.
int port_of(const std::string& job) {
  uint32_t mixed = 2166136261U;  // FNV-1a, which is the same on every host
  for (const char letter : job) mixed = (mixed ^ static_cast<unsigned char>(letter)) * 16777619U;
  return kFirstPort + static_cast<int>(mixed % kPorts);
}

std::string job_of(const Launcher& launcher) {
  if (&launcher == &kSlurm) return fmt::format("{}.{}", env("SLURM_JOB_ID").value_or(""), env("SLURM_STEP_ID").value_or(""));
  if (&launcher == &kMpi[0]) return env("PMIX_NAMESPACE").value_or("");
  return &launcher == &kMpi[1] ? env("PMI_JOBID").value_or("") : "";
}

int slurm_port() {
  constexpr int kStepsApart = 101;
  const auto job = env_int("SLURM_JOB_ID", 0, kMost).value_or(0);
  const auto step = env_int("SLURM_STEP_ID", 0, std::numeric_limits<int64_t>::max()).value_or(0);
  return static_cast<int>(kFirstPort + (job + step % kPorts * kStepsApart) % kPorts);
}

/// The launcher whose variables hold for this process; null if there is none.
const Launcher* launcher_of_this_process() {
  const auto* const outer = outer_launcher();
  const auto* const plain = plain_launcher();
  // torchrun may run inside a job of another launcher, which has then started torchrun and not the ranks.
  if (plain != nullptr && (outer == nullptr || env("TORCHELASTIC_RUN_ID"))) return plain;
  if (outer == nullptr && env(kPmix.rank)) {
    throw ConfigError("{}={} says that this process is one of several, but nothing says of how many; set {}", kPmix.rank, *env(kPmix.rank),
                      kPmix.size);
  }
  if (outer != nullptr && plain != nullptr && !agree(*plain, *outer)) throw contradiction(*plain, *outer);
  return outer;
}

bool all_ranks_are_here(const Launcher& launcher) {
  if (&launcher == &kSlurm) return env("SLURM_STEP_NUM_NODES") == "1";
  return env_int(launcher.local_size, 1, kMost) == env_int(launcher.size, 1, kMost);
}

}  // namespace

std::optional<Identity> identity_from_environment() {
  const auto* const launcher = launcher_of_this_process();
  return launcher == nullptr ? std::nullopt : identity_by(*launcher);
}

std::string launcher_in_words() {
  const auto* const launcher = launcher_of_this_process();
  return launcher == nullptr ? "" : fmt::format("{} ({})", launcher->name, launcher->rank);
}

std::optional<int> local_rank_from_environment() {
  const auto* const launcher = launcher_of_this_process();
  for (const auto* each : {&kPlain, launcher}) {
    const auto rank = each != nullptr ? env_int(each->local_rank, 0, kMost) : std::nullopt;
    if (rank) return static_cast<int>(*rank);
  }
  return std::nullopt;
}

MeetingPoint meeting_point() {
  const auto* const launcher = launcher_of_this_process();
  const bool slurm = launcher == &kSlurm;
  const auto job = launcher == nullptr ? "" : job_of(*launcher);
  const int usual = slurm ? slurm_port() : job.empty() ? kDefaultPort : port_of(job);
  MeetingPoint point{
      .host = env("MASTER_ADDR").value_or(""), .port = static_cast<int>(env_int("MASTER_PORT", 1, 65535).value_or(usual)), .job = job};
  // torchrun serves its store at MASTER_ADDR, wherever the ranks are.
  point.one_host = launcher != nullptr && all_ranks_are_here(*launcher) && env("TORCHELASTIC_USE_AGENT_STORE") != "True";
  if (point.one_host || (point.host.empty() && !slurm)) {
    point.host = "127.0.0.1";
  } else if (point.host.empty()) {
    point.host = first_host(env("SLURM_STEP_NODELIST").value_or("127.0.0.1"));
  }
  return point;
}

std::vector<std::string_view> launcher_variables() {
  std::vector<std::string_view> names;
  std::vector<Launcher> launchers(kMpi.begin(), kMpi.end());
  launchers.insert(launchers.end(), {kPlain, kPmix, kSlurm});
  for (const auto& launcher : launchers) {
    for (const char* name : {launcher.rank, launcher.size, launcher.local_rank, launcher.local_size}) {
      if (name != nullptr) names.emplace_back(name);
    }
  }
  return names;
}

int restart_count() {
  return static_cast<int>(env_int("TORCHELASTIC_RESTART_COUNT", 0, kMost).value_or(0));
}

std::string first_host(const std::string& list) {
  const auto refuse = [&] { return ConfigError("'{}' is not a list of hosts as Slurm writes it; set MASTER_ADDR", list); };
  std::string host;
  for (size_t i = 0; i < list.size() && list[i] != ','; i++) {
    if (list[i] != '[') {
      host += list[i];
      continue;
    }
    const auto close = list.find(']', i);
    const auto number_end = list.find_first_of(",-]", i);
    if (close == std::string::npos || number_end == i + 1) throw refuse();
    host += list.substr(i + 1, number_end - i - 1);
    i = close;
  }
  if (host.empty()) throw refuse();
  return host;
}

}  // namespace tessera
