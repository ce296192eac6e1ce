// Collectives among replicas, as nodes of the graph.
#pragma once

#include <vector>

#include "tessera/xla/graph/node.h"

namespace tessera::xla::hlo {

/// The groups of a collective: lists of equal length, each replica in exactly one.
using ReplicaGroups = std::vector<std::vector<int>>;

/// Concatenates the lists of a group.
Value all_gather(const Value& list, const ReplicaGroups& groups);
Value all_reduce(const Value& x, Combine combine, const ReplicaGroups& groups);
/// Returns each replica's part of the reduced list.
Value reduce_scatter(const Value& list, Combine combine, const ReplicaGroups& groups);
Value replica_number();

}  // namespace tessera::xla::hlo
