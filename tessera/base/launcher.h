// Reads what the launcher of this process says in environment variables: which rank it is, of how many, and where the ranks meet.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

struct Identity {
  int rank = 0;
  int world_size = 1;

  bool operator==(const Identity&) const = default;
};
/// The identity that the environment gives this process, or nothing if it gives none. Throws ConfigError if only a part of it is set, or if
/// the variables of two launchers contradict each other.
std::optional<Identity> identity_from_environment();

/// The launcher that has started this process, and the variable that says so: "mpirun of Open MPI (OMPI_COMM_WORLD_RANK)". Empty if there is
/// none.
std::string launcher_in_words();

/// The number of this rank on its host, if a launcher has set it.
std::optional<int> local_rank_from_environment();

/// How often the launcher has started all ranks again after a failure. If this is not 0, a program resumes from its newest checkpoint.
int restart_count();

/// Where rank 0 keeps the store of the job.
struct MeetingPoint {
  std::string host;
  int port = 0;
  bool one_host = false;  // all ranks are on this host, so no other host needs to reach the store
  /// The name that a launcher has given to this job and to no other one, so that a rank does not join the ranks of another job. Empty if
  /// the launcher gives none.
  std::string job = {};
};
/// The meeting point according to MASTER_ADDR and MASTER_PORT, or to the variables of Slurm or MPI.
MeetingPoint meeting_point();

/// The variables by which launchers number their ranks.
std::vector<std::string_view> launcher_variables();

/// The first host of a list in Slurm's notation: "n07" for "n[07-09,12],login". Throws ConfigError if it has another form.
std::string first_host(const std::string& list);

}  // namespace tessera
