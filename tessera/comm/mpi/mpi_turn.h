// MpiTurns: lets the ranks of one world make their communicators one after the other.
#pragma once

#include <chrono>
#include <memory>

#include "tessera/comm/mpi/mpi_backend.h"

namespace tessera {

/// MPI makes a communicator in a call that waits for all of its ranks. If two threads make two of them, one rank may begin with the first
/// and another rank with the second, and both would wait for ever. So the store counts turns, and each communicator has one of its own.
class MpiTurns {
 public:
  MpiTurns(const StorePtr& store, std::chrono::milliseconds limit) : store_(store->clone()), limit_(limit) {}

  /// Collective over the ranks of `part`: their communicator.
  std::shared_ptr<MpiComm> make_comm(const MpiComm& whole, Link& part) const;

 private:
  void wait_for_turn(MpiThread::Clock::time_point end) const;

  const StorePtr store_;
  const std::chrono::milliseconds limit_;
};

}  // namespace tessera
