// Settings that `tessera launch` and `tessera test` choose for the ranks that they start on this host.
#pragma once

#include <optional>
#include <string>

namespace tessera::cli {

/// The number of cores that this process may use.
int cores();
/// Returns OMP_NUM_THREADS for each of so many ranks: the present value if it is set, or else the cores divided by the ranks, at least one.
std::string threads_of_a_rank(int ranks);
/// Returns GOMP_SPINCOUNT for each of so many ranks: how long a thread that waits for others spins on its core. By default, libgomp spins
/// for milliseconds, in which other threads may need the core. Returns nothing if ranks have one thread each, if there are more cores than
/// threads of all ranks, or if the environment says how threads wait.
std::optional<std::string> turns_of_a_wait(int ranks, const std::string& threads);
/// Makes a name for a run that no other run has: the present time and random digits.
std::string run_name();

}  // namespace tessera::cli
