#include "tessera/comm/topology.h"

#include <algorithm>

namespace tessera {

Topology::Topology(std::span<const int> host_of) {
  std::vector<int> seen;
  for (size_t rank = 0; rank < host_of.size(); rank++) {
    const auto known = std::ranges::find(seen, host_of[rank]);
    const auto host = known - seen.begin();
    if (known == seen.end()) {
      seen.push_back(host_of[rank]);
      ranks_.emplace_back();
    }
    host_of_.push_back(static_cast<int>(host));
    place_of_.push_back(static_cast<int>(ranks_[host].size()));
    ranks_[host].push_back(static_cast<int>(rank));
  }
}

Topology Topology::one_host(int ranks) {
  return Topology(std::vector<int>(ranks, 0));
}

Topology Topology::part(std::span<const int> members) const {
  std::vector<int> hosts;
  for (const int member : members) hosts.push_back(host_of(member));
  return Topology(hosts);
}

}  // namespace tessera
