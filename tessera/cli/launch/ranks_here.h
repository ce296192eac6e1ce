// What the commands that start ranks on this host decide for them.
#pragma once

#include <optional>
#include <string>

namespace tessera::cli {

/// The cores that this process may use.
int cores();
/// OMP_NUM_THREADS for each of so many ranks: its value if it is set, or else the cores divided by the ranks, at least one.
std::string threads_of_a_rank(int ranks);
/// GOMP_SPINCOUNT for each of so many ranks, where so many threads of each fill the cores: how long a thread that waits for the others keeps
/// its core. libgomp's own choice is milliseconds, in which others may need the core. Nothing if the environment says how threads wait.
std::optional<std::string> turns_of_a_wait(int ranks, const std::string& threads);
/// What the ranks of a job know, and nobody else.
std::string random_secret();
/// A name for a run that no other one has: when it began, and something random.
std::string run_name();

}  // namespace tessera::cli
