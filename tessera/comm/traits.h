// The properties of a group: its ranks, and the properties of the engine that moves their data.
#pragma once

#include <c10/core/Device.h>

#include <numeric>
#include <string>
#include <vector>

#include "tessera/comm/topology.h"

namespace tessera {

/// How an engine prefers the parameters of a unit to be packed.
enum class Packing { OneBuffer, BufferPerParameter };
/// Whether sums are taken in the order that Topology defines, so that the same run gives the same bits, or in any order.
enum class SumOrder { Defined, Any };

struct GroupTraits {
  std::string name;        // the engine's name
  bool simulated = false;  // the other ranks do not exist
  int size = 1;
  Topology topology = Topology::one_host(1);  // the hosts of all `size` ranks
  std::vector<int> local_ranks = {0};         // the ranks whose values this process's tensors hold: one, or all on a tracing engine
  std::vector<int> world_ranks = {};          // for each rank, its number in the world from which the group was split
  c10::Device device = c10::kCPU;             // where tensors must be
  Packing packing = Packing::OneBuffer;
  SumOrder sums = SumOrder::Defined;
  int levels = 1;       // 2: data crosses the network once a host, and the ranks of a host can share memory (see Among)
  bool traces = false;  // operations are recorded and not run, so there is nothing to prefetch

  /// Whether there are other ranks whose values may differ from those of this process.
  bool can_differ() const { return size > 1 && !simulated && !traces; }
};

/// The numbers of all ranks of a world.
inline std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace tessera
