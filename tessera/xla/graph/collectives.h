// Collectives among replicas, as nodes of the graph.
#pragma once

#include <vector>

#include "tessera/xla/graph/node.h"

namespace tessera::xla::hlo {

/// Which replicas meet: lists of one length, in which each replica stands once.
using ReplicaGroups = std::vector<std::vector<int>>;

/// The lists of a group one after the other.
Value all_gather(const Value& list, const ReplicaGroups& groups);
Value all_reduce(const Value& x, Combine combine, const ReplicaGroups& groups);
/// Each replica's part of the reduced list.
Value reduce_scatter(const Value& list, Combine combine, const ReplicaGroups& groups);
Value replica_number();

}  // namespace tessera::xla::hlo
