// Values that the commands which start ranks on this host choose for them.
#pragma once

#include <optional>
#include <string>

namespace tessera::cli {

/// The cores that this process may use.
int cores();
/// OMP_NUM_THREADS for each of so many ranks: its value if it is set, or else the cores divided by the ranks, at least one.
std::string threads_of_a_rank(int ranks);
/// GOMP_SPINCOUNT for each of so many ranks, if the threads of all ranks fill the cores: how long a thread that waits for the others keeps
/// its core. libgomp's own choice is milliseconds, in which others may need the core. Nothing if the environment says how threads wait.
std::optional<std::string> turns_of_a_wait(int ranks, const std::string& threads);
/// A random text that only the ranks of a job know.
std::string random_secret();
/// A name for a run that no other one has: when it began, and something random.
std::string run_name();

}  // namespace tessera::cli
