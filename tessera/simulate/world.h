// The world of a dry run: one process plays rank 0, and the other ranks do whatever it does. No data moves.
#pragma once

#include <chrono>

#include "tessera/comm/communicator.h"
#include "tessera/comm/topology.h"

namespace tessera::simulate {

struct Machine;

/// What moves in a world of a dry run, for whoever counts.
class Traffics {
 public:
  virtual ~Traffics() = default;
  /// An operation that takes so many seconds and sends so many bytes to other ranks, and how many of these to other hosts.
  virtual void moved(Operation operation, double seconds, uint64_t bytes, uint64_t across) = 0;
};

Communicator simulated_world(const Topology& topology, const Machine& machine, Traffics& traffics, std::chrono::milliseconds limit);

}  // namespace tessera::simulate
