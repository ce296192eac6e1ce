#include "tessera/simulate/network.h"

#include <algorithm>
#include <cmath>

#include "tessera/simulate/machine.h"

namespace tessera::simulate {
namespace {

/// The ranks of a group on hosts that are alike. A rank sends through two links: `inner` to ranks of its host, and its host's part of `outer`
/// to the network.
struct GroupOnHosts {
  int hosts, ranks;  // ranks on each host
  MachineLink inner, outer;
  double message;

  int size() const { return hosts * ranks; }
};

double log2_up(int count) {
  return std::ceil(std::log2(count));
}

// Each function returns the seconds of an all-gather to, or a reduce-scatter of, a buffer of `bytes`, unless it says otherwise.

/// Ranks of one host: each copies, or adds, what the others have.
double by_shared_memory(const GroupOnHosts& group, double bytes) {
  if (group.ranks == 1) return 0;
  return 2 * group.inner.latency + bytes * (group.ranks - 1) / group.ranks / group.inner.bandwidth;
}

/// Every rank sends its part to every other rank, as over gloo.
double at_one_level(const GroupOnHosts& group, double bytes) {
  if (group.hosts == 1) return by_shared_memory(group, bytes);
  const auto part = bytes / group.size();
  const auto network = group.ranks * (group.size() - group.ranks) * part / group.outer.bandwidth;
  const auto inside = (group.ranks - 1) * part / group.inner.bandwidth;
  const auto turns = group.size() <= 3 ? 1 : log2_up(group.size());  // three ranks or fewer agree by sending all to all
  const auto agreement = turns * (group.outer.latency + group.message);
  return agreement + group.outer.latency + (group.size() - 1) * group.message + std::max(network, inside);
}

/// Every part crosses the network once for each other host; within the host it goes through shared memory, or is there already.
double at_two_levels(const GroupOnHosts& group, double bytes, Among whole_of) {
  const auto inside = whole_of == Among::Host ? 0 : by_shared_memory(group, bytes);
  if (group.hosts == 1) return inside;
  const auto agreement = 2 * group.inner.latency + log2_up(group.hosts) * (group.outer.latency + group.message);
  const auto network = bytes * (group.hosts - 1) / group.hosts / group.outer.bandwidth;
  return agreement + group.outer.latency + (group.hosts - 1) * group.message + network + inside;
}

/// Rings as NCCL's, which together use the whole link of each host: each part passes all ranks.
double by_ring(const GroupOnHosts& group, double bytes) {
  const auto between = group.hosts > 1 ? group.hosts : 0;  // hops
  const auto hops = between * group.outer.latency + (group.size() - 1 - between) * group.inner.latency;
  const auto inside = bytes * (group.size() - 1) / group.size() / group.inner.bandwidth;
  const auto network = bytes * (group.hosts - 1) / group.hosts / group.outer.bandwidth;
  return hops + (group.size() - 1) * group.message + std::max(inside, network);
}

/// Down a binary tree, in pieces that follow one another.
double down_tree(const GroupOnHosts& group, double bytes) {
  const auto hops = log2_up(group.hosts) * group.outer.latency + log2_up(group.ranks) * group.inner.latency;
  const auto slower = group.hosts > 1 ? std::min(group.inner.bandwidth, group.outer.bandwidth) : group.inner.bandwidth;
  return hops + bytes / slower;
}

/// A root sends everything to each other rank or host, through its own link.
double from_root(const GroupOnHosts& group, double bytes, int levels) {
  const auto here = group.ranks > 1 ? 2 * group.inner.latency + bytes / group.inner.bandwidth : 0;
  if (group.hosts == 1) return here;
  const auto receivers = levels > 1 ? group.hosts - 1 : group.size() - group.ranks;
  return at_two_levels(group, 0, Among::Host) + receivers * (bytes / group.outer.bandwidth + group.message) + here;
}

}  // namespace

double collective_seconds(const Machine& machine, Operation operation, double bytes, const Topology& topology, int levels,
                          Among whole_of) {
  if (topology.ranks() == 1) return 0;
  GroupOnHosts group{.hosts = topology.hosts(),
                     .ranks = static_cast<int>(topology.ranks_on(0).size()),
                     .inner = machine.inner,
                     .outer = machine.outer,
                     .message = machine.message};
  group.outer.bandwidth /= std::max(1, machine.ranks_per_host / group.ranks);
  const bool on_gpus = machine.kind == "gpu";
  const auto parts = [&](double size) {
    return on_gpus ? by_ring(group, size) : levels > 1 ? at_two_levels(group, size, whole_of) : at_one_level(group, size);
  };
  switch (operation) {
    case Operation::AllGather:
    case Operation::ReduceScatter: return parts(bytes);
    case Operation::AllReduce: return 2 * (on_gpus ? std::min(parts(bytes), down_tree(group, bytes)) : parts(bytes));
    case Operation::Broadcast: return on_gpus ? down_tree(group, bytes) : from_root(group, bytes, levels);
    default: return on_gpus ? 2 * down_tree(group, 0) : parts(0);
  }
}

}  // namespace tessera::simulate
