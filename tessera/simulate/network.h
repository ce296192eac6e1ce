// How long collectives take, by the latency and the bandwidth of a machine's links. docs/scaling.md has the formulas.
#pragma once

#include "tessera/comm/operation.h"
#include "tessera/comm/topology.h"

namespace tessera::simulate {

struct Machine;

/// `bytes`: of the whole buffer of a group with this topology, as they are sent. Over two levels, the sums of a reduction are sent between
/// hosts in the dtype in which they are added. On CPUs, `levels` is as GroupTraits::levels, and `whole_of` as Request::whole_of: Among::Host
/// if the ranks of a host share the memory that is gathered. Where a host has more ranks than the group has there, as many groups are taken
/// to share the host's link at once.
double collective_seconds(const Machine& machine, Operation operation, double bytes, const Topology& topology, int levels,
                          Among whole_of = Among::Group);

}  // namespace tessera::simulate
