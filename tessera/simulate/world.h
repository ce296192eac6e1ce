// The world of a dry run: one process plays rank 0, and the other ranks do whatever it does. No data moves.
#pragma once

#include <functional>

#include "tessera/comm/communicator.h"
#include "tessera/comm/topology.h"

namespace tessera::simulate {

struct Machine;

/// Called for each operation with how many seconds it takes, and how many bytes it sends to other ranks, and of these to other hosts.
using CountTraffic = std::function<void(Operation operation, double seconds, uint64_t bytes, uint64_t across)>;

/// The machine must outlive the world.
Communicator simulated_world(const Topology& topology, const Machine& machine, const CountTraffic& count);

}  // namespace tessera::simulate
