// Which ranks of a group share a host, and the order in which sums over the group are taken.
#pragma once

#include <span>
#include <vector>

namespace tessera {

/// A value. Hosts are numbered in the order in which ranks first name them.
///
/// Sums run in one order whatever moves the bytes: over the ranks of each host in rank order, then over the hosts in theirs. So a sum that is
/// taken within hosts first, and then across them, has the same bits as one that every rank takes by itself.
class Topology {
 public:
  /// `host_of[r]`: any number that tells the host of rank r from others.
  explicit Topology(std::span<const int> host_of);
  static Topology one_host(int ranks);

  int ranks() const { return static_cast<int>(host_of_.size()); }
  int hosts() const { return static_cast<int>(ranks_.size()); }
  int host_of(int rank) const { return host_of_[static_cast<size_t>(rank)]; }
  /// In ascending order.
  std::span<const int> ranks_on(int host) const { return ranks_[static_cast<size_t>(host)]; }

  /// Of a group of these ranks, in this order.
  Topology part(std::span<const int> members) const;

 private:
  std::vector<int> host_of_;
  std::vector<std::vector<int>> ranks_;
};

}  // namespace tessera
