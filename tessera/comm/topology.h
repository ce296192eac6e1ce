// Which ranks of a group share a host, and the order in which sums over the group are taken.
#pragma once

#include <span>
#include <vector>

namespace tessera {

/// A value. Hosts are numbered in the order of their first ranks.
///
/// Transports with SumOrder::Defined add first over the ranks of each host, in rank order, then over the hosts, in host order. A sum that
/// is first computed within hosts and then across them therefore has the same bits as a sum that one rank computes alone.
class Topology {
 public:
  /// `host_of[r]`: any number that identifies the host of rank r.
  explicit Topology(std::span<const int> host_of);
  static Topology one_host(int ranks);

  int ranks() const { return static_cast<int>(host_of_.size()); }
  int hosts() const { return static_cast<int>(ranks_.size()); }
  int host_of(int rank) const { return host_of_[rank]; }
  /// The ranks of a host, in ascending order.
  std::span<const int> ranks_on(int host) const { return ranks_[host]; }

  /// The topology of a group of these ranks, in this order.
  Topology part(std::span<const int> members) const;

 private:
  std::vector<int> host_of_;
  std::vector<std::vector<int>> ranks_;
};

}  // namespace tessera
