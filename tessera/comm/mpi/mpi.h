// The engine mpi: ranks that mpirun has started talk over MPI.
#pragma once

#include "tessera/comm/engine.h"

namespace tessera {

/// Connects the ranks of the MpiMeeting in whose scope it is called, or else those that the launcher has started.
Connection connect_mpi(const Meeting& meeting);

}  // namespace tessera
