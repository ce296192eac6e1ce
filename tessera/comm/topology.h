// Which ranks of a group share a host, and the order in which sums over the group are taken.
#pragma once

#include <span>
#include <vector>

namespace tessera {

/// A value. Hosts are numbered in the order of their first ranks.
///
/// Transports with SumOrder::Defined add the values of each host's ranks, in rank order, and then the sums of the hosts, in host order. So
/// it makes no difference to the bits whether each host sends its sum, or each rank sends its values to the rank that adds.
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
  /// The position of a rank among the ranks of its host.
  int place_of(int rank) const { return place_of_[rank]; }
  /// The rank of `host` that, over two levels, exchanges with `rank`, which is on another host: so the network connects each rank of the
  /// larger host with one rank of the smaller.
  int partner(int rank, int host) const { return ranks_[host][static_cast<size_t>(place_of(rank)) % ranks_[host].size()]; }

  /// The topology of a group of these ranks, in this order.
  Topology part(std::span<const int> members) const;

 private:
  std::vector<int> host_of_, place_of_;
  std::vector<std::vector<int>> ranks_;
};

}  // namespace tessera
