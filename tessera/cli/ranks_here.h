// What the commands that start ranks on this host decide for them.
#pragma once

#include <string>

namespace tessera::cli {

/// The cores that this process may use.
int cores();
/// OMP_NUM_THREADS for each of so many ranks: its value if it is set, or else the cores divided by the ranks, at least one.
std::string threads_of_a_rank(int ranks);
/// What the ranks of a job know, and nobody else.
std::string random_secret();
/// A name for a run that no other one has: when it began, and something random.
std::string run_name();

}  // namespace tessera::cli
