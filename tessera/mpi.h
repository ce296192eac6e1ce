// tessera::init for programs that use MPI themselves. Not part of tessera/tessera.h, because it needs the header of an MPI library.
#pragma once

#include <mpi.h>

#include <cstring>

#include "tessera/comm/init.h"

namespace tessera {

/// Joins the ranks of a communicator, in their order. The program has called MPI_Init or MPI_Init_thread, and calls MPI_Finalize after the
/// last use of Tessera. Collective over the communicator, which Tessera does not keep.
///
/// Data goes through shared memory on one host, and over MPI between hosts if the program has started MPI with MPI_THREAD_MULTIPLE; else
/// over gloo. InitOptions::transport or TESSERA_TRANSPORT may name another transport, such as mpi also on one host.
inline Communicator init(MPI_Comm communicator, const InitOptions& options = {}) {
#if defined(OPEN_MPI)
  MpiCommunicator given{.library = "Open MPI"};
#elif defined(MPICH_VERSION)
  MpiCommunicator given{.library = "MPICH"};
#else
#error "tessera/mpi.h knows Open MPI and MPICH; mpi.h is of another library"
#endif
  static_assert(sizeof communicator <= sizeof given.handle);
  std::memcpy(&given.handle, &communicator, sizeof communicator);
  return init(given, options);
}

}  // namespace tessera
