// Finds the MPI library of this process and loads the module that calls it.
#pragma once

#include <string>

#include "tessera/comm/mpi/mpi_calls.h"

namespace tessera {

/// Why MPI can't be used in this process; empty if it can. Starts nothing.
std::string why_no_mpi();

/// The calls of the library that the program has loaded, or else of the one whose launcher started this process. Throws ConfigError with
/// the reason if there is none.
MpiCalls& mpi_calls();

}  // namespace tessera
